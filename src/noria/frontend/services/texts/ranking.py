"""Ranks documents by a query: with a reranker, which sees them together, or by the vectors of their tokens (MaxSim)."""

from collections.abc import Sequence
from typing import Any

from noria.errors import InvalidField
from noria.frontend.services.texts.encoding_result import EncodingResult
from noria.protocol.text import EncoderModelSpec, EncoderTask

RANKING_TASKS: Sequence[EncoderTask] = ("reranking", "token_embedding")
"""The tasks of models that rank."""


def ranking_inputs(spec: EncoderModelSpec, query: str, documents: Sequence[str]) -> dict[str, Any]:
    """Return the fields of `TextRequestSettings` for a model of `RANKING_TASKS`.

    Raises InvalidField: the model's vectors of tokens are not made for MaxSim.
    """
    if spec.task == "token_embedding" and spec.late_interaction is None:
        raise InvalidField(
            f"model {spec.name!r} returns the states of tokens, which do not rank; name a reranker or a model like "
            "ColBERT.",
            field="model",
        )
    if spec.task == "token_embedding":
        return {"inputs": [query, *documents], "is_ranking": True}
    return {"inputs": [(query, document) for document in documents]}


def num_rows_of_query(result: EncodingResult) -> int:
    """Return how many vectors the query of a result has; 1 for a reranker."""
    query = result.texts[0]
    return query.num_tokens - len(query.skipped) if result.spec.task == "token_embedding" else 1


def ranking_logits(result: EncodingResult) -> Sequence[float]:
    """Return the model's own score of each document: a reranker's logit, or MaxSim.

    MaxSim is the sum over the query's vectors of the largest dot product with a vector of the document.
    """
    if result.spec.task != "token_embedding":
        return result.numbers
    query_QD, *documents = result.token_arrays()
    return [float((query_QD @ each.T).max(1).sum()) if len(each) else 0.0 for each in documents]
