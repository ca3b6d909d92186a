"""The HTTP API as an OpenAPI 3.1 document: schemas from the msgspec structs, bounds and defaults from the model served.

Everything follows from the declared operations; what the types of bodies do not say, their `describe` functions add,
from the limits that the server enforces. tests/frontend/openapi/test_schemathesis.py sends what the document allows and
what it forbids.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from noria import __version__
from noria.errors import MethodNotAllowed, MissingScope, NoriaError, RouteNotFound, SetupError, Unauthorized, all_codes
from noria.frontend.http.errors import ErrorDialect
from noria.frontend.http.operations import Content, JsonObject, Operation, Served
from noria.frontend.openapi.generators import for_generators
from noria.protocol.diffusion import DiffusionModelSpec

_SECURITY_SCHEMES = {
    "bearer": {
        "type": "http",
        "scheme": "bearer",
        "description": "`Authorization: Bearer KEY`, as OpenAI's clients send it",
    },
    "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
    "basic": {
        "type": "http",
        "scheme": "basic",
        "description": "any user, and KEY as the password, as A1111's clients send it",
    },
}


def openapi(operations: Sequence[Operation], served: Served) -> JsonObject:
    """Return the document of the operations that have a summary; it lacks bounds of models that are not known yet."""
    documented = [operation for operation in operations if operation.summary]
    schemas = _Schemas(documented)
    schemas.describe(documented, served)
    components: JsonObject = {"schemas": schemas.by_name}
    needs_keys = bool(served.config.api_keys_file)
    if needs_keys:
        components["securitySchemes"] = _SECURITY_SCHEMES
    paths: JsonObject = {}
    for operation in documented:
        described = _describe(operation, schemas, served, needs_keys=needs_keys)
        paths.setdefault(operation.documented_path, {})[operation.method.lower()] = described
    document = {
        "openapi": "3.1.0",
        "info": {
            "title": "Noria",
            "version": __version__,
            "description": "Images from text, and embeddings of texts. " + _serving(served.spec),
        },
        "paths": paths,
        "components": components,
    }
    return for_generators(document)


def served_errors() -> list[type[NoriaError]]:
    """Return the errors that a response can have, sorted by status and code."""
    error_types = [error_type for error_type in all_codes().values() if not issubclass(error_type, SetupError)]
    return sorted(error_types, key=lambda error_type: (error_type.http_status, error_type.code))


def first_line(error_type: type[NoriaError]) -> str:
    """Return the meaning of an error: the first line of its docstring."""
    return (error_type.__doc__ or "").partition("\n")[0]


def _serving(spec: DiffusionModelSpec | None) -> str:
    if spec is None:
        return "No image model is ready."
    needs = ", a model for inpainting: each of its requests needs an image and a mask" if spec.needs_mask else ""
    return f"Serving {spec.name}{needs}."


class _Schemas:
    """The schemas of the types that operations take and return, by their names."""

    def __init__(self, operations: Iterable[Operation]) -> None:
        types = list(dict.fromkeys(each for operation in operations for each in _types_of(operation)))
        schemas, self.by_name = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
        self._by_type = dict(zip(types, schemas, strict=True))

    def describe(self, operations: Iterable[Operation], served: Served) -> None:
        """Add examples and descriptions to the bodies, and what the operations' `describe` functions know."""
        for operation in operations:
            for name, description in (operation.fields or {}).items():
                body = self.by_name[_first_type(operation.body).__name__]
                if name in body["properties"]:
                    body["properties"][name]["description"] = description
                if operation.example is not None:
                    body["example"] = operation.example
        for describe in dict.fromkeys(operation.describe for operation in operations if operation.describe):
            describe(self.by_name, served)

    def content(self, content: Content) -> JsonObject:
        """Return a content object of OpenAPI."""
        return {
            media_type: {"schema": self._schema(each)} if each != {} else {}
            for media_type, each in _by_media_type(content).items()
        }

    def _schema(self, content: Content) -> JsonObject:
        if isinstance(content, dict):
            return content
        if isinstance(content, tuple):
            return {"anyOf": [self._schema(each) for each in content]}
        return self._by_type[content]


def _by_media_type(content: Content) -> JsonObject:
    if content is None:
        return {}
    return content if isinstance(content, dict) else {"application/json": {} if content is Any else content}


def _types_of(operation: Operation) -> Iterator[type]:
    yield operation.errors_as.body_type
    others = [content for _, content in (operation.other_responses or {}).values()]
    for content in (operation.body, operation.response, *others):
        for each in _by_media_type(content).values():
            yield from each if isinstance(each, tuple) else () if isinstance(each, dict) else (each,)


def _first_type(content: Content) -> type:
    """Return the struct whose members are the fields of a body, or of the items of a list."""
    first = next(iter(_by_media_type(content).values()))
    first = first[0] if isinstance(first, tuple) else first
    struct_type: type = getattr(first, "__args__", (first,))[0]
    return struct_type


def _describe(operation: Operation, schemas: _Schemas, served: Served, *, needs_keys: bool) -> JsonObject:
    done = {"description": "done", "content": schemas.content(operation.response)}
    responses: dict[int, JsonObject] = {operation.status: done}
    responses |= _error_responses(_errors_of(operation), operation.errors_as, schemas)
    for status, (description, content) in (operation.other_responses or {}).items():
        responses[status] = {"description": description}
        if content is not None:
            responses[status]["content"] = schemas.content(content)
    described: JsonObject = {"summary": operation.summary, "description": operation.description}
    parameters = operation.parameters(served) if callable(operation.parameters) else operation.parameters
    if parameters:
        described["parameters"] = list(parameters)
    if operation.body is not None:
        described["requestBody"] = {
            "required": operation.body_is_required,
            "content": schemas.content(operation.body),
        }
    if needs_keys and operation.scopes is not None:
        described["security"] = [
            {name: [scope] if scope else []} for scope in operation.scopes or ("",) for name in _SECURITY_SCHEMES
        ]
        of_keys = [Unauthorized, *([MissingScope] if operation.scopes else [])]
        responses = _error_responses(of_keys, operation.errors_as, schemas) | responses
    described["responses"] = {str(status): response for status, response in sorted(responses.items())}
    return described


def _errors_of(operation: Operation) -> Sequence[type[NoriaError]]:
    if operation.errors is not None or operation.body is None:
        return operation.errors or ()
    others = (MethodNotAllowed,) if "{" in operation.path else (MethodNotAllowed, RouteNotFound)
    return [*(each for each in served_errors() if each not in others), *operation.errors_as.more_errors]


def _error_responses(
    errors: Iterable[type[NoriaError]], dialect: ErrorDialect, schemas: _Schemas
) -> dict[int, JsonObject]:
    """Return a response for each HTTP status of `errors`."""
    by_status: dict[int, list[str]] = {}
    for error_type in errors:
        meaning = f"`{dialect.name(error_type)}`: {first_line(error_type)}"
        by_status.setdefault(dialect.status(error_type), []).append(meaning)
    content = schemas.content(dialect.body_type)
    return {status: {"description": "; ".join(meanings), "content": content} for status, meanings in by_status.items()}
