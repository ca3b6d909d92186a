"""The route of endpoints with code of the operator's in the OpenAPI document."""

from typing import Any

from noria.frontend.openapi.operations import error_responses, operation, parameter, served_errors

_INPUTS = {
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
    "description": "without a `preprocess`: a text, or a list of texts or pairs",
}
_BODY = {"type": "object", "properties": {"inputs": _INPUTS}, "example": {"inputs": ["a red circle"]}}


def paths() -> dict[str, Any]:
    """Return the operations by path."""
    described = operation(
        "Call an endpoint with code of the operator's",
        "Body and response are what its code makes of them.",
        content={"application/json": {}},
    )
    described["responses"] |= error_responses(served_errors())
    return {
        "/v1/endpoints/{name}": {
            "post": described
            | {
                "parameters": [parameter("name", "path")],
                "requestBody": {"required": True, "content": {"application/json": {"schema": _BODY}}},
            }
        },
    }
