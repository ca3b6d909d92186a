"""The operations of the Open Inference Protocol over REST, below /v2, and the form of their errors."""

import functools
from typing import Any

from msgspec import Struct

from noria.errors import EngineUnavailable, ModelNotFound, OperationNotSupported, RouteNotFound
from noria.frontend.access.api_keys import KeyScope
from noria.frontend.http.errors import ErrorDialect
from noria.frontend.http.operations import JsonObject, Operation, Served, parameter
from noria.frontend.protocols.open_inference.inference import PARAMETERS
from noria.frontend.protocols.open_inference.rest_body import (
    HEADER,
    InferInputBody,
    InferOutputBody,
    InferRequestBody,
    InferResponseBody,
)
from noria.frontend.protocols.open_inference.routes import OpenInferenceRoutes, RepositoryIndexBody

_ROOT = "/v2"

SCOPES: tuple[KeyScope, ...] = ("generate",)
"""The scope that a key needs for operations and for calls of gRPC."""


class OpenInferenceErrorBody(Struct, frozen=True):
    """The body of an error of the Open Inference Protocol."""

    error: str


_ERRORS = ErrorDialect(OpenInferenceErrorBody, lambda error, _: OpenInferenceErrorBody(error.message), roots=(_ROOT,))

_EXAMPLE = {"inputs": [{"name": "TEXT", "shape": [2], "datatype": "BYTES", "data": ["a red circle", "a blue square"]}]}
_FIELDS = {
    "inputs": "`TEXT`, or `input_ids`, `attention_mask` and, of models that have it, `token_type_ids`",
    "outputs": "those that the response shall have; default: all",
    "parameters": "; ".join(f"`{name}`: {meaning}" for name, meaning in PARAMETERS.items()),
    "id": "is repeated in the response",
}
_MINIMUM: dict[str, JsonObject] = {"integer": {"minimum": 0}}


def open_inference_operations(routes: OpenInferenceRoutes) -> list[Operation]:
    """Return the operations that `routes` serve.

    Those with a version come first, because names of models may have slashes.
    """
    operation = functools.partial(
        Operation, group="The Open Inference Protocol", scopes=SCOPES, response=Any, errors_as=_ERRORS
    )
    get = functools.partial(operation, method="GET")
    probe = functools.partial(get, scopes=None, is_probe=True, is_polled=True)
    operations = [
        get(
            path=_ROOT,
            handler=routes.server_metadata,
            summary="Get the server's name, version and extensions",
            description="In the form of the Open Inference Protocol.",
        ),
        probe(
            path=f"{_ROOT}/health/live",
            handler=routes.live,
            summary="Check liveness",
            description="200 as long as the process responds.",
        ),
        probe(
            path=f"{_ROOT}/health/ready",
            handler=routes.ready,
            summary="Check readiness",
            description="200 if an engine is ready, else 503.",
            errors=[EngineUnavailable],
        ),
        get(
            path=f"{_ROOT}/models/stats",
            handler=routes.all_statistics,
            summary="Get the statistics of all text encoders",
            description="In Triton's form.",
        ),
    ]
    model = f"{_ROOT}/models/{{model:path}}"
    version = parameter("version", "path", enum=["1"])
    for path, parameters in (
        (f"{model}/versions/{{version}}", [parameter("model", "path"), version]),
        (model, [parameter("model", "path")]),
    ):
        of_model = functools.partial(operation, parameters=parameters, errors=[ModelNotFound, EngineUnavailable])
        operations += [
            of_model(
                method="POST",
                path=f"{path}/infer",
                handler=routes.infer,
                summary="Compute texts or tokens",
                description="Texts are the input `TEXT` of BYTES, tokens are `input_ids` and `attention_mask`. The "
                "output is `embedding`, or `logits` of other tasks. Binary tensors follow the JSON, whose length is in "
                f"{HEADER}.",
                body=InferRequestBody,
                fields=_FIELDS,
                example=_EXAMPLE,
                response={"application/json": InferResponseBody, "application/octet-stream": {}},
                errors=None,
                describe=_describe,
            ),
            of_model(
                method="GET",
                path=f"{path}/ready",
                handler=routes.model_ready,
                summary="Check whether a text encoder is ready",
                description="200, or 503.",
            ),
            of_model(
                method="GET",
                path=f"{path}/config",
                handler=routes.config,
                summary="Get a text encoder's configuration in Triton's form",
                description="Shapes are without texts.",
            ),
            of_model(
                method="GET",
                path=f"{path}/stats",
                handler=routes.statistics,
                summary="Get a text encoder's statistics in Triton's form",
                description="Summed over all front ends.",
            ),
            of_model(
                method="GET",
                path=path,
                handler=routes.metadata,
                summary="Get the inputs and outputs of a text encoder",
                description="Shapes have -1 for any size.",
            ),
        ]
    operations.append(
        operation(
            method="POST",
            path=f"{_ROOT}/repository/index",
            handler=routes.index,
            summary="List the text encoders",
            description="With `ready`, those that are.",
            body=RepositoryIndexBody,
            body_is_required=False,
            fields={"ready": "leave out models that are not ready"},
            example={"ready": True},
        )
    )
    return operations + [
        operation(
            method="POST",
            path=f"{_ROOT}/repository/models/{{model:path}}/{name}",
            handler=routes.load,
            summary=f"Reject to {name} a model",
            description="Models are loaded at the start.",
            parameters=[parameter("model", "path")],
            errors=[OperationNotSupported, RouteNotFound],
        )
        for name in ("load", "unload")
    ]


def _describe(schemas: dict[str, JsonObject], _: Served) -> None:
    """Add what the types of the body of an inference do not say."""
    schemas[InferRequestBody.__name__]["properties"]["inputs"] |= {"minItems": 1, "maxItems": 3}
    parameters = _parameters(
        dict.fromkeys(("priority", "timeout", "dimensions"), "integer")
        | dict.fromkeys(("normalize", "truncate", "binary_data_output"), "boolean")
        | {"prompt_name": "string"}
    )
    parameters["properties"]["priority"]["maximum"], parameters["properties"]["dimensions"]["minimum"] = 3, 1
    of_request = schemas[InferRequestBody.__name__]["properties"]
    of_request["parameters"] = {"description": of_request["parameters"]["description"]} | parameters
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


def _parameters(types: dict[str, str]) -> JsonObject:
    properties = {
        name: {"type": [type_name, "null"], **_MINIMUM.get(type_name, {})} for name, type_name in types.items()
    }
    return {"type": ["object", "null"], "properties": properties}
