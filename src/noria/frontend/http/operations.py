"""An operation is a method of a path. It declares once what routing, keys, error responses and documents need of it."""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from starlette.requests import Request
from starlette.responses import Response

from noria.config import FrontendConfig
from noria.errors import NoriaError
from noria.frontend.access.api_keys import KeyScope
from noria.frontend.http.errors import DEFAULT_ERRORS, ErrorDialect
from noria.protocol.diffusion import DiffusionModelSpec
from noria.protocol.text import EncoderModelSpec

JsonObject = dict[str, Any]
Handler = Callable[[Request], Coroutine[Any, Any, Response]]

Group = Literal[
    "Generate",
    "Encode texts",
    "Models",
    "Jobs",
    "The running batch",
    "Deployments",
    "Statistics",
    "Lineage",
    "A1111's API",
    "The Open Inference Protocol",
    "The server itself",
]
"""The titles above operations in the documents, in this order."""

Content = Any
"""The content of a body or a response: a type, whose JSON it is; a tuple of types, one of which it is; or by media type
a type or a JSON schema, {} for any. None: there is none."""

IMAGE_CONTENT: JsonObject = {f"image/{name}": {} for name in ("png", "webp", "jpeg")}
"""The content of an image file."""

EVENT_STREAM: JsonObject = {"text/event-stream": {}}
"""The content of server-sent events."""


@dataclass(frozen=True, slots=True)
class Served:
    """The models and settings that give fields their bounds; None: no engine with such a model was ready yet."""

    spec: DiffusionModelSpec | None
    embedding_spec: EncoderModelSpec | None
    config: FrontendConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A method of a path, the function that serves it, and all that others need to know of it.

    `scopes` are those of which an API key needs one; () lets any key in, None also requests without a key. An operation
    with `body` can have every error, unless `errors` says which. `fields` describe the members of the body, a type, of
    which `example` is a value. `describe` adds to the schemas of the document, by their names, what types do not say.
    """

    method: str
    path: str  # as Starlette writes it: /v1/models/{model:path}
    handler: Handler
    group: Group
    scopes: tuple[KeyScope, ...] | None
    summary: str = ""  # empty: the documents leave it out
    description: str = ""
    body: Content = None
    fields: Mapping[str, str] | None = None
    example: JsonObject | None = None
    body_is_required: bool = True
    response: Content = None
    status: int = 200
    other_responses: Mapping[int, tuple[str, Content]] | None = None  # by status: the description and the content
    errors: Sequence[type[NoriaError]] | None = None
    errors_as: ErrorDialect = DEFAULT_ERRORS
    parameters: Sequence[JsonObject] | Callable[[Served], Sequence[JsonObject]] = ()
    describe: Callable[[dict[str, JsonObject], Served], None] | None = None
    is_probe: bool = False  # health checks of load balancers, which may send no Host
    is_polled: bool = False  # every few seconds, or by the dozen when a page opens: logged at the level debug
    is_traced: bool = True  # those without a key are not

    @property
    def documented_path(self) -> str:
        """The path as OpenAPI writes it."""
        return self.path.replace(":path}", "}")


def parameter(name: str, location: str, **schema: Any) -> JsonObject:
    """Return a parameter, by default a string; `location` is "path", "query" or "header"."""
    return {"name": name, "in": location, "required": location == "path", "schema": {"type": "string"} | schema}


REQUEST_ID = parameter("X-Request-Id", "header") | {
    "description": "an id for the log and the response: up to 128 of A-Z a-z 0-9 . _ -; any other value is replaced"
}
