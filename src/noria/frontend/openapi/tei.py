"""The routes of text-embeddings-inference in the OpenAPI document: their bodies' fields, operations and errors."""

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from noria.config import FrontendConfig
from noria.errors import (
    EmptyInput,
    EngineUnavailable,
    MethodNotAllowed,
    ModelNotFound,
    NoriaError,
    RouteNotFound,
    UntokenizableText,
    WrongTask,
)
from noria.frontend.http.errors import TeiErrorBody, tei_error
from noria.frontend.openapi.operations import first_line, json_content, operation, served_errors
from noria.frontend.routes.tei.bodies import (
    EmbedRequestBody,
    PredictRequestBody,
    RerankRequestBody,
    SimilarityInputs,
    SimilarityRequestBody,
    TokenClassificationRequestBody,
    TokenizeRequestBody,
)
from noria.frontend.routes.tei.routes import Info, Token
from noria.frontend.services.texts.scores import Entity, Prediction, Rank

_BODIES: dict[type[Struct], dict[str, Any]] = {  # with an example
    EmbedRequestBody: {"inputs": ["a red circle", "a blue square"]},
    PredictRequestBody: {"inputs": "what a lovely day"},
    RerankRequestBody: {"query": "what is red?", "texts": ["a red circle", "a blue square"]},
    SimilarityRequestBody: {"inputs": {"source_sentence": "a red circle", "sentences": ["a red disc", "a dog"]}},
    TokenizeRequestBody: {"inputs": "a red circle"},
    TokenClassificationRequestBody: {"inputs": "My name is Sarah and I live in London"},
}

STRUCTS = (*_BODIES, Info, Token, Entity, Prediction, Rank, TeiErrorBody)
"""What the document has schemas of."""

_DESCRIPTIONS = {
    "inputs": "a text, or several",
    "query": "what the texts are compared with",
    "texts": "the texts to rank",
    "normalize": "whether embeddings have length 1; default: true",
    "prompt_name": "name of the model's prompt to put before each text; default: the model's default prompt",
    "dimensions": "cut the embeddings to so many numbers",
    "encoding_format": "`float` is the only one",
    "truncate": "cut texts that are too long, or reject them; default: `frontend.truncate_texts`",
    "truncation_direction": "the end that is cut off; default: `right`",
    "raw_scores": "return logits, not scores from 0 to 1",
    "return_text": "return each text with its rank",
    "add_special_tokens": "whether the tokens include special ones; default: true",
    "parameters": "further options, as huggingface_hub sends them; at `/predict` the response to them is a batch",
    "model": "the name of a served text encoder; default: the first of the task",
    "priority": "`low`, `normal` or `high`: the order in which waiting texts are encoded",
    "deadline_ms": "milliseconds from now in which the response is needed; rejected at once if that is not possible",
}


def add_to_schemas(schemas: dict[str, Any], config: FrontendConfig) -> None:
    """Add descriptions, examples and bounds, and the forms of `inputs`, to the bodies among `schemas`."""
    text = {"type": "string", "minLength": 1, "maxLength": config.max_text_chars}
    pair = {"type": "array", "minItems": 1, "maxItems": 2, "items": text}
    ids = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
    several = {"type": "array", "minItems": 1, "maxItems": config.max_texts}
    texts = several | {"items": text}
    inputs: dict[type[Struct], list[dict[str, Any]]] = {
        EmbedRequestBody: [text, texts, ids, several | {"items": ids}],
        PredictRequestBody: [text, pair, several | {"items": pair}],
        TokenizeRequestBody: [text, texts],
        TokenClassificationRequestBody: [text, texts],
    }
    for body, example in _BODIES.items():
        schema = schemas[body.__name__]
        schema["example"] = example
        if body in inputs:
            schema["properties"]["inputs"] = {"anyOf": inputs[body]}
        for name, field in schema["properties"].items():
            field["description"] = _DESCRIPTIONS[name]
    sentences = schemas[SimilarityInputs.__name__]["properties"]
    sentences["source_sentence"], sentences["sentences"] = text, texts
    ranked = schemas[RerankRequestBody.__name__]["properties"]
    ranked["query"] |= text
    ranked["texts"] |= texts


def paths() -> dict[str, Any]:
    """Return the operations by path, but for `POST /`."""
    numbers = {"type": "array", "items": {"type": "number"}}
    lists = {"type": "array", "items": _list_of(Prediction)}
    return {
        "/embed": {
            "post": _post(
                "Embed texts with text-embeddings-inference's API",
                "One embedding for each text, also if there is only one. X-Noria-Truncated has the number of texts "
                "that were cut.",
                EmbedRequestBody,
                {"type": "array", "items": numbers},
            )
        },
        "/predict": {
            "post": _post(
                "Classify texts or pairs",
                "`inputs` is a text, a pair, or a batch of lists with a text or a pair each. The labels of each, the "
                "best first.",
                PredictRequestBody,
                {"anyOf": [_list_of(Prediction), lists]},
            )
        },
        "/rerank": {
            "post": _post(
                "Rank texts by a query",
                "The texts' indices and scores, the best first.",
                RerankRequestBody,
                _list_of(Rank),
            )
        },
        "/similarity": {
            "post": _post(
                "Compare sentences",
                "The cosine of each sentence's embedding and that of `source_sentence`.",
                SimilarityRequestBody,
                numbers,
            )
        },
        "/tokenize": {
            "post": _post(
                "Tokenize texts",
                "The tokens of each text, not cut, and where they stand in it, in characters.",
                TokenizeRequestBody,
                {"type": "array", "items": _list_of(Token)},
            )
        },
        "/info": {
            "get": _with_tei_errors(
                operation(
                    "Describe the first text encoder", "Null is what Noria does not have.", content=json_content(Info)
                ),
                [ModelNotFound, EngineUnavailable],
            )
        },
        "/health": {
            "get": _with_tei_errors(
                operation("Check readiness for text-embeddings-inference's clients", "As `/readyz`.", content={}),
                [EngineUnavailable],
            )
        },
    }


def root() -> dict[str, Any]:
    """Return the operation of `POST /`."""
    routes = (EmbedRequestBody, PredictRequestBody, RerankRequestBody, SimilarityRequestBody)
    bodies = [_reference(body) for body in (*routes, TokenClassificationRequestBody)]
    described = _post(
        "Serve the first text encoder",
        "As `/embed` or `/predict`, depending on the model's task; a body with `query` as `/rerank`, one with a "
        "`source_sentence` as `/similarity`. A model that classifies tokens returns their entities. huggingface_hub's "
        "client calls this route.",
        EmbedRequestBody,
        {"type": "array"},
    )
    described["requestBody"]["content"]["application/json"]["schema"] = {"anyOf": bodies}
    return described


def _post(summary: str, description: str, body: type[Struct], response: dict[str, Any]) -> dict[str, Any]:
    content = {"application/json": {"schema": response}}
    routing = (RouteNotFound, MethodNotAllowed)
    errors = [error_type for error_type in served_errors() if error_type not in routing]
    errors += [EmptyInput, UntokenizableText, WrongTask]
    described = _with_tei_errors(operation(summary, description, content=content), errors)
    return described | {"requestBody": {"required": True, "content": json_content(body)}}


def _with_tei_errors(described: dict[str, Any], errors: Sequence[type[NoriaError]]) -> dict[str, Any]:
    """Add a response for each status of `errors`."""
    by_status: dict[int, list[str]] = {}
    for error_type in errors:
        name, status = tei_error(error_type)
        by_status.setdefault(status, []).append(f"`{name}`: {first_line(error_type)}")
    described["responses"] |= {
        str(status): {"description": "; ".join(meanings), "content": json_content(TeiErrorBody)}
        for status, meanings in sorted(by_status.items())
    }
    return described


def _reference(struct_type: type[Struct]) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{struct_type.__name__}"}


def _list_of(struct_type: type[Struct]) -> dict[str, Any]:
    return {"type": "array", "items": _reference(struct_type)}
