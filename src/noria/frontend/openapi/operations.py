"""What the paths of /openapi.json are made of: operations, their parameters, and the errors that they can answer."""

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from noria.errors import MethodNotAllowed, NoriaError, RouteNotFound, SetupError, all_codes
from noria.frontend.http.error_body import ErrorBody


def operation(
    summary: str,
    description: str,
    *,
    content: dict[str, Any],
    body: type[Struct] | None = None,
    errors: Sequence[type[NoriaError]] = (),
) -> dict[str, Any]:
    """An operation that is answered 200 with one of `answers`, by media type. One with a `body` can end in every error there is."""
    operation_object: dict[str, Any] = {
        "summary": summary,
        "description": description,
        "responses": {"200": {"description": "done", "content": content}} | error_responses(errors),
    }
    if body is not None:
        operation_object["requestBody"] = {"required": True, "content": json_content(body)}
        routing_errors = (RouteNotFound, MethodNotAllowed)
        operation_object["responses"] |= error_responses(
            [error_type for error_type in served_errors() if error_type not in routing_errors]
        )
    return operation_object


def get_only(summary: str, description: str, media_type: str) -> dict[str, Any]:
    """A path that is only asked for, and answers with one media type."""
    return {"get": operation(summary, description, content={media_type: {}})}


def error_responses(errors: Sequence[type[NoriaError]]) -> dict[str, Any]:
    """A response for each status that one of `errors` has."""
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
    """The kinds of error that a response can carry, by status and code."""
    error_types = [error_type for error_type in all_codes().values() if not issubclass(error_type, SetupError)]
    return sorted(error_types, key=lambda error_type: (error_type.http_status, error_type.code))


def first_line(error_type: type[NoriaError]) -> str:
    """What an error means, from its docstring."""
    return (error_type.__doc__ or "").partition("\n")[0]


def json_content(struct_type: type[Struct]) -> dict[str, Any]:
    """A content that is `kind` as JSON."""
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{struct_type.__name__}"}}}


def parameter(name: str, location: str) -> dict[str, Any]:
    """A parameter in the `path`, the `query` or a `header`."""
    return {"name": name, "in": location, "required": location == "path", "schema": {"type": "string"}}
