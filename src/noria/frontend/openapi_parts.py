"""What the paths of /openapi.json are made of: operations, their parameters, and the errors that they can answer."""

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from noria.errors import MethodNotAllowed, NoriaError, RouteNotFound, SetupError, all_codes
from noria.frontend.refusals import ErrorAnswer


def operation(
    summary: str,
    description: str,
    *,
    answers: dict[str, Any],
    body: type[Struct] | None = None,
    errors: Sequence[type[NoriaError]] = (),
) -> dict[str, Any]:
    """An operation that is answered 200 with one of `answers`, by media type. One with a `body` can end in every error there is."""
    described: dict[str, Any] = {
        "summary": summary,
        "description": description,
        "responses": {"200": {"description": "done", "content": answers}} | error_responses(errors),
    }
    if body is not None:
        described["requestBody"] = {"required": True, "content": json_of(body)}
        of_routing = (RouteNotFound, MethodNotAllowed)
        described["responses"] |= error_responses([kind for kind in served_errors() if kind not in of_routing])
    return described


def plain(summary: str, description: str, media_type: str) -> dict[str, Any]:
    """A path that is only asked for, and answers with one media type."""
    return {"get": operation(summary, description, answers={media_type: {}})}


def error_responses(errors: Sequence[type[NoriaError]]) -> dict[str, Any]:
    """A response for each status that one of `errors` has."""
    by_status: dict[int, list[type[NoriaError]]] = {}
    for kind in errors:
        by_status.setdefault(kind.http_status, []).append(kind)
    return {
        str(status): {
            "description": "; ".join(f"`{kind.code}`: {first_line(kind)}" for kind in kinds),
            "content": json_of(ErrorAnswer),
        }
        for status, kinds in sorted(by_status.items())
    }


def served_errors() -> list[type[NoriaError]]:
    """The kinds of error that a response can carry, by status and code."""
    kinds = [kind for kind in all_codes().values() if not issubclass(kind, SetupError)]
    return sorted(kinds, key=lambda kind: (kind.http_status, kind.code))


def first_line(kind: type[NoriaError]) -> str:
    """What an error means, from its docstring."""
    return (kind.__doc__ or "").partition("\n")[0]


def json_of(kind: type[Struct]) -> dict[str, Any]:
    """A content that is `kind` as JSON."""
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{kind.__name__}"}}}


def parameter(name: str, place: str) -> dict[str, Any]:
    """A parameter in the `path`, the `query` or a `header`."""
    return {"name": name, "in": place, "required": place == "path", "schema": {"type": "string"}}
