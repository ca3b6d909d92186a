"""The web pages: HTML, CSS and ES modules from `frontend/pages/`, without a build step; and the documents.

The names of all files are read at the start, so no path from a request reaches the file system.
"""

import functools
import hashlib
import pathlib
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from noria.errors import RouteNotFound
from noria.folders import documents
from noria.frontend.http.operations import Handler, Operation, parameter
from noria.frontend.http.page_shell import page_shell

PAGES_DIR = pathlib.Path(__file__).parent


@dataclass(frozen=True)
class Page:
    """A page, whose content and script are `NAME/NAME.html` and `NAME/NAME.js` below `PAGES_DIR`."""

    name: str
    styles: tuple[str, ...]
    summary: str
    description: str

    @property
    def address(self) -> str:
        """Its address, relative to the server's."""
        return "./" if self.name == "playground" else self.name

    def render(self) -> str:
        """Return its HTML."""
        return page_shell(
            (PAGES_DIR / self.name / f"{self.name}.html").read_text(encoding="utf-8"),
            address=self.address,
            title=self.name,
            styles=self.styles,
            script=f"{self.name}/{self.name}.js",
        )


PAGES = (
    Page(
        "playground",
        ("playground/playground.css",),
        "Open the playground",
        "A page that generates images; without an image model, as `/text`.",
    ),
    Page(
        "text",
        ("playground/playground.css", "text/text.css"),
        "Open the playground of texts",
        "A page that embeds, classifies and ranks texts.",
    ),
    Page(
        "live", ("live/live.css",), "Open the live view", "A page with the running batch, its queue and its statistics."
    ),
    Page(
        "models", ("registry/registry.css",), "Open the models", "A page with the versions of models in the registry."
    ),
    Page(
        "deployments",
        ("registry/registry.css", "deployments/deployments.css"),
        "Open the deployments",
        "A page with the traffic of endpoints, canaries and their judge.",
    ),
    Page(
        "lineage",
        ("registry/registry.css", "lineage/lineage.css"),
        "Open the lineage",
        "A page with what made what, as a graph.",
    ),
    Page(
        "drift",
        ("registry/registry.css", "drift/drift.css"),
        "Open the drift view",
        "A page with distributions beside their reference, and over time.",
    ),
)

_MEDIA_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".md": "text/plain",  # browsers store text/markdown instead of showing it
}

# Pages show images that they made themselves (blob:, data:) and connect to this server only.
_CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGE_HEADERS = {
    # Browsers revalidate each time: a new version is used at once, and a 304 is small.
    "Cache-Control": "no-cache",
    "Content-Security-Policy": _CONTENT_SECURITY_POLICY,
    "Referrer-Policy": "no-referrer",
}
"""The headers of every page, static or generated."""


@dataclass(frozen=True)
class StaticFile:
    """A file in memory, served with an ETag."""

    content: bytes
    media_type: str
    etag: str

    @classmethod
    def of(cls, content: bytes, suffix: str) -> "StaticFile":
        """Return the file with `content`, whose name ends with `suffix`."""
        return cls(content, _MEDIA_TYPES[suffix], f'"{hashlib.sha256(content).hexdigest()[:16]}"')

    async def __call__(self, http: Request) -> Response:
        """Return the file, or 304 if the client has this version."""
        headers = PAGE_HEADERS | {"ETag": self.etag}
        if http.headers.get("if-none-match") == self.etag:
            return Response(status_code=304, headers=headers)
        return Response(self.content, media_type=self.media_type, headers=headers)


def without_other_kinds(page: str, kinds: Collection[str]) -> str:
    """Return a page's HTML without what is for kinds of models that are not served: elements with their `data-kind`.

    No element holds another of its own name. All stay while `kinds` is empty: no model is known yet.
    """
    if not kinds:
        return page
    return re.sub(rf'<(\w+) [^>]*data-kind="(?!{"|".join(kinds)})[^>]*>.*?</\1>\s*', "", page, flags=re.DOTALL)


def page_operations(kinds: Callable[[], Collection[str]]) -> list[Operation]:
    """Return an operation for each page, one for the files of `PAGES_DIR`, and one for documents.

    They need no key: a page requests all that it shows with its reader's key. `kinds` returns the kinds of models
    served. A server of text encoders alone has their page at / too.
    """
    files = {
        path.relative_to(PAGES_DIR).as_posix(): StaticFile.of(path.read_bytes(), path.suffix)
        for path in sorted(PAGES_DIR.rglob("*"))
        if path.suffix in _MEDIA_TYPES
    }
    pages = {page.address: page.render() for page in PAGES}

    @functools.cache
    def page_file(address: str, kinds: frozenset[str]) -> StaticFile:
        return StaticFile.of(without_other_kinds(pages[address], kinds).encode(), ".html")

    def handler(address: str) -> Handler:
        async def serve(http: Request) -> Response:
            served = frozenset(kinds())
            return await page_file("text" if address == "./" and served == {"encoder"} else address, served)(http)

        return serve

    async def asset(http: Request) -> Response:
        name = http.path_params["name"]
        if name not in files:
            raise HTTPException(404)
        return await files[name](http)

    texts = documents()

    @functools.cache
    def document_file(name: str) -> StaticFile:
        return StaticFile.of(texts[name].read_bytes(), ".md")

    async def document(http: Request) -> Response:
        name = http.path_params["name"]
        if name not in texts:
            raise HTTPException(404)
        return await document_file(name)(http)

    get = functools.partial(Operation, method="GET", group="The server itself", scopes=None)
    return [
        *(
            get(
                path=f"/{page.address.removeprefix('./')}",
                handler=handler(page.address),
                summary=page.summary,
                description=page.description,
                response={"text/html": {}},
            )
            for page in PAGES
        ),
        # One operation for all files: each has a histogram of its own in /metrics.
        get(path="/pages/{name:path}", handler=asset, is_polled=True),
        get(
            path="/docs/{name:path}",
            handler=document,
            summary="Read a document",
            description="Markdown of this version, such as `install.md`, under the names that messages and alerts "
            "give.",
            parameters=[parameter("name", "path")],
            response={"text/plain": {}},
            errors=[RouteNotFound],
        ),
    ]
