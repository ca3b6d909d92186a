"""The meaning of logits: scores, labels in order, ranks, and the entities that tokens form. Pure.

Scores are those of transformers' pipelines. Documents are ranked by a reranker, which sees them with the query, or by
the vectors of their tokens (MaxSim).
"""

import math
import operator
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from msgspec import UNSET, Struct, UnsetType

from noria.errors import InvalidField
from noria.frontend.services.texts.encoding_result import EncodingResult
from noria.models.encoder.tokenizers.tokens import CharSpan
from noria.protocol.text import Activation, EncoderModelSpec, EncoderTask, Similarity

Aggregation = Literal["none", "simple"]
"""Whether each token is an entity, or neighbouring tokens of one label are; transformers' names."""

Logits = Sequence[float]
_MIN_NORM = 1e-12


class Prediction(Struct, frozen=True):
    """A label of a text, and how likely it is."""

    score: float
    label: str


class Rank(Struct, frozen=True, omit_defaults=True):
    """A text of a request, and how well it matches the query."""

    index: int
    score: float
    text: str | None = None


class Entity(Struct, frozen=True):
    """A token with a label, or several that belong together. `word` is the text from character `start` to `end`."""

    score: float
    word: str
    start: int
    end: int
    entity: str | UnsetType = UNSET  # the label of a single token
    entity_group: str | UnsetType = UNSET  # the label, without "B-" or "I-"


def scores(logits: Logits, activation: Activation) -> Sequence[float]:
    """Return the scores of one row. No logit is too large for it."""
    match activation:
        case "softmax":
            greatest = max(logits)
            shifted = [math.exp(logit - greatest) for logit in logits]
            total = sum(shifted)
            return [each / total for each in shifted]
        case "sigmoid":
            return [sigmoid(logit) for logit in logits]
        case "identity":
            return logits


def sigmoid(logit: float) -> float:
    """Return 1 / (1 + exp(-logit))."""
    small = math.exp(-abs(logit))
    return (1 if logit >= 0 else small) / (1 + small)


def predictions(
    logits: Logits, labels: Sequence[str], activation: Activation, top_k: int | None = None
) -> list[Prediction]:
    """Return the labels of a text, the best first; of equal ones the first."""
    pairs = sorted(zip(scores(logits, activation), labels, strict=True), key=operator.itemgetter(0), reverse=True)
    return [Prediction(score, label) for score, label in pairs[:top_k]]


def ranks(logits: Logits, activation: Activation, texts: Sequence[str] | None = None) -> list[Rank]:
    """Return the index of each text, the best first; `logits` has one for each. With `texts`, also the texts."""
    each = [score for logit in logits for score in scores([logit], activation)]
    order = sorted(range(len(each)), key=logits.__getitem__, reverse=True)  # the sigmoids of large logits are equal
    return [Rank(index, each[index], None if texts is None else texts[index]) for index in order]


def similarities(kind: Similarity, source: Logits, others: Iterable[Logits]) -> list[float]:
    """Return how similar each of the other embeddings is to one, as sentence-transformers' function of that name."""
    match kind:
        case "cosine":
            norm = math.hypot(*source)
            return [_dot(source, each) / max(norm * math.hypot(*each), _MIN_NORM) for each in others]
        case "dot":
            return [_dot(source, each) for each in others]
        case "euclidean":
            return [-math.dist(source, each) for each in others]
        case "manhattan":
            return [-sum(abs(a - b) for a, b in zip(source, each, strict=True)) for each in others]


def _dot(a: Logits, b: Logits) -> float:
    return sum(one * other for one, other in zip(a, b, strict=True))


def entities(
    text: str,
    tokens: Sequence[tuple[CharSpan, Logits]],
    labels: Sequence[str],
    aggregation: Aggregation = "simple",
    ignored: Collection[str] = ("O",),
) -> list[Entity]:
    """Return what tokens of `text` are labelled as, but for the `ignored` labels, in the order of the text.

    `tokens` has the span and the logits of each, without special tokens. As in transformers, a group has the mean score
    of its tokens, and a label with "B-" begins a new one.
    """
    groups: list[_Group] = []
    for (start, end), logits in tokens:
        greatest = max(logits)
        label = labels[list(logits).index(greatest)]
        score = 1 / sum(math.exp(logit - greatest) for logit in logits)  # the softmax of the greatest
        tag = label[2:] if label.startswith(("B-", "I-")) else label
        if aggregation == "simple" and groups and groups[-1].tag == tag and not label.startswith("B-"):
            groups[-1].scores.append(score)
            groups[-1].end = end
        else:
            groups.append(_Group(label, tag, [score], start, end))
    found = []
    for group in groups:
        name = group.label if aggregation == "none" else group.label.split("-", 1)[-1]
        if name not in ignored:
            field = "entity" if aggregation == "none" else "entity_group"
            score, word = sum(group.scores) / len(group.scores), text[group.start : group.end]
            found.append(Entity(score, word, group.start, group.end, **{field: name}))
    return found


@dataclass(slots=True)
class _Group:
    label: str  # label of the first token
    tag: str  # the label without "B-" or "I-"
    scores: list[float]
    start: int
    end: int


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
