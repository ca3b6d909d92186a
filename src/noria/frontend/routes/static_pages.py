"""The web pages: HTML, CSS and ES modules from `frontend/pages/`, without a build step or files of other servers.

All files are read once at the start, so no path from a request reaches the file system.
"""

import functools
import hashlib
import pathlib
import re
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from noria.frontend.http.paths import ASSETS_PATH

PAGES_DIR = pathlib.Path(__file__).parents[1] / "pages"

_MEDIA_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
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
    """One file in memory, served with an ETag."""

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


def page_routes(pages: dict[str, str], kinds: Callable[[], Collection[str]] = tuple) -> list[Route]:
    """Return a route for each of `pages` (path to file name), and one route for all files of `PAGES_DIR`.

    `kinds` returns the kinds of models served. A server of text encoders alone has their page at / too.
    """
    contents = {path.name: path.read_bytes() for path in sorted(PAGES_DIR.iterdir()) if path.suffix in _MEDIA_TYPES}
    files = {name: StaticFile.of(content, pathlib.Path(name).suffix) for name, content in contents.items()}

    @functools.cache
    def page_file(name: str, kinds: frozenset[str]) -> StaticFile:
        return StaticFile.of(without_other_kinds(contents[name].decode(), kinds).encode(), ".html")

    def page(path: str, name: str) -> Callable[[Request], Awaitable[Response]]:
        async def serve(http: Request) -> Response:
            served = frozenset(kinds())
            shown = pages["/text"] if path == "/" and served == {"encoder"} else name
            return await page_file(shown, served)(http)

        return serve

    async def asset(http: Request) -> Response:
        name = http.path_params["name"]
        if name not in files:
            raise HTTPException(404)
        return await files[name](http)

    # One route for all files: each route has a histogram of its own in /metrics.
    return [
        *(Route(path, page(path, name)) for path, name in pages.items()),
        Route(f"{ASSETS_PATH}/{{name}}", asset),
    ]
