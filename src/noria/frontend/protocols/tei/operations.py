"""The operations of text-embeddings-inference: what they take and return, and the form of their errors."""

import functools
from collections.abc import Mapping
from typing import Any, Literal

from msgspec import Struct

from noria.errors import (
    DeadlineUnmeetable,
    EmptyInput,
    EngineCrashed,
    EngineLost,
    EngineUnavailable,
    GenerationFailed,
    InvalidBody,
    InvalidField,
    ModelNotFound,
    NoriaError,
    QueueFull,
    RateLimited,
    RequestError,
    UntokenizableText,
    WrongTask,
)
from noria.frontend.bodies.ranked_documents import INSTRUCTION, RankedDocuments, RerankDocumentsBody
from noria.frontend.http.errors import ErrorDialect
from noria.frontend.http.operations import JsonObject, Operation, Served
from noria.frontend.protocols.tei.bodies import (
    EmbedRequestBody,
    EncodeRequestBody,
    PredictRequestBody,
    RerankRequestBody,
    SimilarityInputs,
    SimilarityRequestBody,
    TokenClassificationRequestBody,
    TokenizeRequestBody,
)
from noria.frontend.protocols.tei.routes import Info, SparseValue, TeiRoutes, Token
from noria.frontend.services.texts.scores import Prediction, Rank
from noria.frontend.services.texts.text_request import SIDE_FIELDS

TeiErrorType = Literal["Validation", "Empty", "Tokenizer", "Overloaded", "Backend", "Unhealthy"]

_ERRORS: Mapping[type[NoriaError], tuple[TeiErrorType, int]] = {
    InvalidField: ("Validation", 422),
    InvalidBody: ("Validation", 422),
    EmptyInput: ("Empty", 400),
    UntokenizableText: ("Tokenizer", 422),
    WrongTask: ("Backend", 424),
    QueueFull: ("Overloaded", 429),
    RateLimited: ("Overloaded", 429),
    DeadlineUnmeetable: ("Overloaded", 429),
    GenerationFailed: ("Backend", 424),
    EngineCrashed: ("Backend", 424),
    EngineUnavailable: ("Unhealthy", 503),
    EngineLost: ("Unhealthy", 503),
}
"""text-embeddings-inference's type and status of an error. All others keep their status: it has none for them."""


class TeiErrorBody(Struct, frozen=True):
    """The body of every error response of text-embeddings-inference's routes."""

    error: str
    error_type: TeiErrorType


def _error(error_type: type[NoriaError]) -> tuple[TeiErrorType, int]:
    default: TeiErrorType = "Validation" if issubclass(error_type, RequestError) else "Backend"
    return _ERRORS.get(error_type, (default, error_type.http_status))


TEI_ERRORS = ErrorDialect(
    TeiErrorBody,
    lambda error, _: TeiErrorBody(error.message, _error(type(error))[0]),
    status=lambda error_type: _error(error_type)[1],
    name=lambda error_type: _error(error_type)[0],
    more_errors=(EmptyInput, UntokenizableText, WrongTask),
)

_FIELDS = {
    "inputs": "a text, or several",
    "query": "what the texts are compared with",
    "texts": "the texts to rank",
    "normalize": "whether embeddings have length 1; default: true",
    "prompt_name": "name of the model's prompt to put before each text; default: the model's default prompt",
    **SIDE_FIELDS,
    "dimensions": "cut the embeddings to so many numbers",
    "encoding_format": "`float` is the only one",
    "truncate": "cut texts that are too long, or reject them; default: `frontend.truncate_texts`",
    "truncation_direction": "the end that is cut off; default: the model's, mostly `right`",
    "raw_scores": "return logits, not scores from 0 to 1",
    "return_text": "return each text with its rank",
    "top_n": "return so many of the best; below 1 all",
    "instruction": INSTRUCTION,
    "add_special_tokens": "whether the tokens include special ones; default: true",
    "parameters": "further options, as huggingface_hub sends them; at `/predict` the response to them is a batch",
    "model": "the name of a served text encoder; default: the first of the task",
    "priority": "`low`, `normal` or `high`: the order in which waiting texts are encoded",
    "deadline_ms": "milliseconds from now in which the response is needed; rejected at once if that is not possible",
}


def tei_operations(routes: TeiRoutes) -> list[Operation]:
    """Return the operations that `routes` serve."""
    operation = functools.partial(Operation, group="Encode texts", errors_as=TEI_ERRORS)
    post = functools.partial(operation, method="POST", scopes=("generate",), fields=_FIELDS, describe=_describe)
    return [
        post(
            path="/embed",
            handler=routes.reading(EmbedRequestBody, routes.embed),
            summary="Embed texts with text-embeddings-inference's API",
            description="One embedding for each text, also if there is only one. X-Noria-Truncated has the number of "
            "texts that were cut.",
            body=EmbedRequestBody,
            example={"inputs": ["a red circle", "a blue square"]},
            response=list[list[float]],
        ),
        post(
            path="/embed_all",
            handler=routes.reading(EncodeRequestBody, routes.embed_all),
            summary="Embed the tokens of texts",
            description="The vectors of each text's tokens, of a model with late interaction (ColBERT). `input_type` "
            "says whether the texts are queries or documents, which such models encode differently.",
            body=EncodeRequestBody,
            example={"inputs": ["a red circle"], "input_type": "document"},
            response=list[list[list[float]]],
        ),
        post(
            path="/embed_sparse",
            handler=routes.reading(EncodeRequestBody, routes.embed_sparse),
            summary="Embed texts sparsely",
            description="The tokens of the vocabulary that a text is about, by their ids, and how much: what is not 0 "
            "of its sparse embedding (SPLADE).",
            body=EncodeRequestBody,
            example={"inputs": ["a red circle", "a blue square"]},
            response=list[list[SparseValue]],
        ),
        post(
            path="/predict",
            handler=routes.reading(PredictRequestBody, routes.predict),
            summary="Classify texts or pairs",
            description="`inputs` is a text, a pair, or a batch of lists with a text or a pair each. The labels of "
            "each, the best first.",
            body=PredictRequestBody,
            example={"inputs": "what a lovely day"},
            response=(list[Prediction], list[list[Prediction]]),
        ),
        post(
            path="/rerank",
            handler=routes.rerank,
            summary="Rank texts by a query",
            description="The texts' indices and scores, the best first. A body with `documents` in place of `texts` is "
            "answered as by `/v1/rerank`.",
            body=(RerankRequestBody, RerankDocumentsBody),
            example={"query": "what is red?", "texts": ["a red circle", "a blue square"]},
            response=(list[Rank], RankedDocuments),
        ),
        post(
            path="/similarity",
            handler=routes.reading(SimilarityRequestBody, routes.similarity),
            summary="Compare sentences",
            description="The similarity of each sentence's embedding and that of `source_sentence`: the cosine, unless "
            "the model's configuration says otherwise.",
            body=SimilarityRequestBody,
            example={"inputs": {"source_sentence": "a red circle", "sentences": ["a red disc", "a dog"]}},
            response=list[float],
        ),
        post(
            path="/tokenize",
            handler=routes.reading(TokenizeRequestBody, routes.tokenize),
            summary="Tokenize texts",
            description="The tokens of each text, not cut, and where they stand in it, in characters.",
            body=TokenizeRequestBody,
            example={"inputs": "a red circle"},
            response=list[list[Token]],
        ),
        post(
            path="/",
            handler=routes.root,
            summary="Serve the first text encoder",
            description="As `/embed` or `/predict`, by the model's task; a body with `query` as `/rerank`, one with a "
            "`source_sentence` as `/similarity`. A model that classifies tokens returns their entities.",
            body=(
                EmbedRequestBody,
                EncodeRequestBody,
                PredictRequestBody,
                RerankRequestBody,
                SimilarityRequestBody,
                TokenClassificationRequestBody,
            ),
            response=list[Any],
        ),
        operation(
            method="GET",
            path="/info",
            handler=routes.info,
            scopes=(),
            summary="Describe the first text encoder",
            description="Null is what Noria does not have.",
            response=Info,
            errors=[ModelNotFound, EngineUnavailable],
        ),
        operation(
            method="GET",
            path="/health",
            handler=routes.health,
            scopes=None,
            summary="Check readiness for text-embeddings-inference's clients",
            description="As `/readyz`.",
            errors=[EngineUnavailable],
            is_probe=True,
            is_polled=True,
        ),
    ]


def _describe(schemas: dict[str, JsonObject], served: Served) -> None:
    """Add bounds, and the forms of `inputs`, to the bodies among `schemas`."""
    config = served.config
    text = {"type": "string", "minLength": 1, "maxLength": config.max_text_chars}
    pair = {"type": "array", "minItems": 1, "maxItems": 2, "items": text}
    ids = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
    several = {"type": "array", "minItems": 1, "maxItems": config.max_texts}
    texts = several | {"items": text}
    inputs: dict[type[Struct], list[JsonObject]] = {
        EmbedRequestBody: [text, texts, ids, several | {"items": ids}],
        EncodeRequestBody: [text, texts, ids, several | {"items": ids}],
        PredictRequestBody: [text, pair, several | {"items": pair}],
        TokenizeRequestBody: [text, texts],
        TokenClassificationRequestBody: [text, texts],
    }
    for body, forms in inputs.items():
        schemas[body.__name__]["properties"]["inputs"] = {"anyOf": forms, "description": _FIELDS["inputs"]}
    classified = schemas[TokenClassificationRequestBody.__name__]
    classified["example"] = {"inputs": "My name is Sarah and I live in London"}
    for name, field in classified["properties"].items():
        field["description"] = _FIELDS[name]
    sentences = schemas[SimilarityInputs.__name__]["properties"]
    sentences["source_sentence"], sentences["sentences"] = text, texts
    ranked = schemas[RerankRequestBody.__name__]["properties"]
    ranked["query"] |= text
    ranked["texts"] |= texts
