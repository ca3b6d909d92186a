"""The paths of the Open Inference Protocol in the OpenAPI document."""

from typing import Any

from msgspec import Struct

from noria.errors import EngineUnavailable, ModelNotFound, NoriaError, OperationNotSupported, RouteNotFound
from noria.frontend.http.errors import OpenInferenceErrorBody
from noria.frontend.http.paths import OPEN_INFERENCE_ROOT as ROOT
from noria.frontend.open_inference.inference import PARAMETERS
from noria.frontend.open_inference.rest_body import (
    HEADER,
    InferInputBody,
    InferOutputBody,
    InferRequestBody,
    InferResponseBody,
)
from noria.frontend.open_inference.routes import RepositoryIndexBody
from noria.frontend.openapi.operations import json_content, operation, parameter

STRUCTS: tuple[type[Struct], ...] = (InferRequestBody, InferResponseBody, RepositoryIndexBody, OpenInferenceErrorBody)
"""The bodies, for the document's schemas."""

_MINIMUM: dict[str, dict[str, Any]] = {"integer": {"minimum": 0}}
_JSON: dict[str, Any] = {"application/json": {}}
_BINARY: dict[str, Any] = {"application/octet-stream": {}}


def paths() -> dict[str, Any]:
    """Return the operations by path."""
    of_model = {
        "": ("get", "Get the inputs and outputs of a text encoder", "Shapes have -1 for any size."),
        "/ready": ("get", "Check whether a text encoder is ready", "200, or 503."),
        "/config": ("get", "Get a text encoder's configuration in Triton's form", "Shapes are without texts."),
        "/stats": ("get", "Get a text encoder's statistics in Triton's form", "Summed over all front ends."),
        "/infer": (
            "post",
            "Compute texts or tokens",
            "Texts are the input `TEXT` of BYTES, tokens are `input_ids` and `attention_mask`. The output is "
            "`embedding`, "
            f"or `logits` of other tasks. Binary tensors follow the JSON, whose length is in {HEADER}.",
        ),
    }
    paths: dict[str, Any] = {
        ROOT: {"get": _operation("Get the server's name, version and extensions", "Of the Open Inference Protocol.")},
        f"{ROOT}/health/live": {"get": _operation("Check liveness", "200 as long as the process responds.")},
        f"{ROOT}/health/ready": {
            "get": _operation("Check readiness", "200 if an engine is ready, else 503.", [EngineUnavailable])
        },
        f"{ROOT}/models/stats": {"get": _operation("Get the statistics of all text encoders", "In Triton's form.")},
        f"{ROOT}/repository/index": {
            "post": _operation("List the text encoders", "With `ready`, those that are.", body=RepositoryIndexBody)
        },
    }
    for path, parameters in (
        (f"{ROOT}/models/{{model}}", [parameter("model", "path")]),
        (
            f"{ROOT}/models/{{model}}/versions/{{version}}",
            [parameter("model", "path"), parameter("version", "path", enum=["1"])],
        ),
    ):
        for suffix, (method, summary, description) in of_model.items():
            body = InferRequestBody if method == "post" else None
            described = _operation(summary, description, [ModelNotFound, EngineUnavailable], body)
            paths[path + suffix] = {method: described | {"parameters": parameters}}
    for name in ("load", "unload"):
        errors: list[type[NoriaError]] = [OperationNotSupported, RouteNotFound]
        described = _operation(f"Reject to {name} a model", "Models are loaded at the start.", errors)
        paths[f"{ROOT}/repository/models/{{model}}/{name}"] = {
            "post": described | {"parameters": [parameter("model", "path")]}
        }
    return paths


def _operation(
    summary: str, description: str, errors: list[type[NoriaError]] | None = None, body: type[Struct] | None = None
) -> dict[str, Any]:
    content = _JSON
    if body is InferRequestBody:
        content = json_content(InferResponseBody) | _BINARY
    described = operation(summary, description, content=content, body=body, errors=errors or [])
    if body is RepositoryIndexBody:
        described["requestBody"]["required"] = False
    for status, response in described["responses"].items():
        if status != "200":
            response["content"] = json_content(OpenInferenceErrorBody)
    return described


def add_to_schemas(schemas: dict[str, Any]) -> None:
    """Add examples and descriptions to the schemas of the bodies."""
    text = {"name": "TEXT", "shape": [2], "datatype": "BYTES", "data": ["a red circle", "a blue square"]}
    for body, example, descriptions in (
        (
            InferRequestBody,
            {"inputs": [text]},
            {
                "inputs": "`TEXT`, or `input_ids`, `attention_mask` and, of models that have it, `token_type_ids`",
                "outputs": "those that the response shall have; default: all",
                "parameters": "; ".join(f"`{name}`: {meaning}" for name, meaning in PARAMETERS.items()),
                "id": "is repeated in the response",
            },
        ),
        (RepositoryIndexBody, {"ready": True}, {"ready": "leave out models that are not ready"}),
    ):
        schema = schemas[body.__name__]
        schema["example"] = example
        for name, description in descriptions.items():
            schema["properties"][name]["description"] = description
    schemas[InferRequestBody.__name__]["properties"]["inputs"] |= {"minItems": 1, "maxItems": 3}
    parameters = _parameters(
        dict.fromkeys(("priority", "timeout", "dimensions"), "integer")
        | dict.fromkeys(("normalize", "truncate", "binary_data_output"), "boolean")
        | {"prompt_name": "string"}
    )
    parameters["properties"]["priority"]["maximum"], parameters["properties"]["dimensions"]["minimum"] = 3, 1
    schemas[InferRequestBody.__name__]["properties"]["parameters"] |= parameters
    value = {"type": ["string", "integer"]}
    schemas[InferInputBody.__name__]["properties"] |= {
        "name": {"enum": ["TEXT", "input_ids", "attention_mask", "token_type_ids"]},
        "shape": {"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": 1, "maxItems": 2},
        "datatype": {"enum": ["BYTES", "INT32", "INT64"]},
        "data": {"type": "array", "items": {"anyOf": [value, {"type": "array", "items": value}]}},
        "parameters": _parameters({"binary_data_size": "integer"}),
    }
    schemas[InferOutputBody.__name__]["properties"] |= {
        "name": {"enum": ["embedding", "logits", "num_tokens"]},
        "parameters": _parameters({"binary_data": "boolean"}),
    }


def _parameters(types: dict[str, str]) -> dict[str, Any]:
    properties = {name: {"type": type_name, **_MINIMUM.get(type_name, {})} for name, type_name in types.items()}
    return {"type": "object", "properties": properties, "additionalProperties": False}
