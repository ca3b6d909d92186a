"""Builds the objects of an OpenAPI document: operations, parameters, bounds and error responses."""

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from noria.errors import MethodNotAllowed, NoriaError, RouteNotFound, SetupError, all_codes
from noria.frontend.http.errors import ErrorBody
from noria.frontend.services.images.request_validation import Limits


def operation(
    summary: str,
    description: str,
    *,
    content: dict[str, Any],
    body: type[Struct] | dict[str, Any] | None = None,
    errors: Sequence[type[NoriaError]] = (),
) -> dict[str, Any]:
    """Return an operation with the response 200, `content` by media type.

    One with a `body`, JSON of a type or a content object, can have every error.
    """
    operation_object: dict[str, Any] = {
        "summary": summary,
        "description": description,
        "responses": {"200": {"description": "done", "content": content}} | error_responses(errors),
    }
    if body is not None:
        body_content = body if isinstance(body, dict) else json_content(body)
        operation_object["requestBody"] = {"required": True, "content": body_content}
        routing_errors = (RouteNotFound, MethodNotAllowed)
        operation_object["responses"] |= error_responses(
            [error_type for error_type in served_errors() if error_type not in routing_errors]
        )
    return operation_object


def get_only(summary: str, description: str, media_type: str) -> dict[str, Any]:
    """Return a path with a GET operation and one media type."""
    return {"get": operation(summary, description, content={media_type: {}})}


def error_responses(errors: Sequence[type[NoriaError]]) -> dict[str, Any]:
    """Return a response for each HTTP status of `errors`."""
    by_status: dict[int, list[type[NoriaError]]] = {}
    for error_type in errors:
        by_status.setdefault(error_type.http_status, []).append(error_type)
    return {
        str(status): {
            "description": "; ".join(f"`{error_type.code}`: {first_line(error_type)}" for error_type in error_types),
            "content": json_content(ErrorBody),
        }
        for status, error_types in sorted(by_status.items())
    }


def served_errors() -> list[type[NoriaError]]:
    """Return the errors that a response can have, sorted by status and code."""
    error_types = [error_type for error_type in all_codes().values() if not issubclass(error_type, SetupError)]
    return sorted(error_types, key=lambda error_type: (error_type.http_status, error_type.code))


def first_line(error_type: type[NoriaError]) -> str:
    """Return the meaning of an error: the first line of its docstring."""
    return (error_type.__doc__ or "").partition("\n")[0]


def json_content(struct_type: type[Struct]) -> dict[str, Any]:
    """Return a content object: `struct_type` as JSON."""
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{struct_type.__name__}"}}}


IMAGE_CONTENT: dict[str, Any] = {f"image/{name}": {} for name in ("png", "webp", "jpeg")}
"""A content object: an image file."""


EVENT_STREAM_CONTENT: dict[str, Any] = {"text/event-stream": {}}
"""A content object: server-sent events."""


def parameter(name: str, location: str, **schema: Any) -> dict[str, Any]:
    """Return a parameter, by default a string; `location` is "path", "query" or "header"."""
    return {"name": name, "in": location, "required": location == "path", "schema": {"type": "string"} | schema}


def add_bounds(field: dict[str, Any], allowed: Limits) -> None:
    """Add the model's bounds and default to a number."""
    types = [each["type"] for each in field.pop("anyOf", [field])]
    field |= {"type": types if len(types) > 1 else types[0], "minimum": allowed.min, "maximum": allowed.max}
    if allowed.multiple > 1:
        field["multipleOf"] = allowed.multiple
    if allowed.default is not None:
        field["default"] = allowed.default
