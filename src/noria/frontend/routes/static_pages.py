"""The pages for people, as files: HTML, CSS and ES modules from `pages/`, served as they are. No build step, nothing from elsewhere.

Read once at the start, so that no path from outside ever reaches the file system.
"""

import hashlib
import pathlib
from dataclasses import dataclass

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

PAGES_DIR = pathlib.Path(__file__).parent / "pages"
ASSETS_PATH = "/pages"  # /pages/NAME is pages/NAME

_MEDIA_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}

# Pages draw pictures that they have made themselves (blob:, data:), and talk to this server only.
_CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
PAGE_HEADERS = {
    "Cache-Control": "no-cache",  # ask each time: a new version is seen at once, and a 304 is small
    "Content-Security-Policy": _CONTENT_SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
"""Of every page, whether it is a file or made when it is asked for."""


@dataclass(frozen=True)
class StaticFile:
    """One file, ready to be sent."""

    content: bytes
    media_type: str
    etag: str

    @classmethod
    def read(cls, path: pathlib.Path) -> "StaticFile":
        """As it is in the package."""
        content = path.read_bytes()
        return cls(content, _MEDIA_TYPES[path.suffix], f'"{hashlib.sha256(content).hexdigest()[:16]}"')

    async def __call__(self, http: Request) -> Response:
        """The file, or 304 to who has it."""
        headers = PAGE_HEADERS | {"ETag": self.etag}
        if http.headers.get("if-none-match") == self.etag:
            return Response(status_code=304, headers=headers)
        return Response(self.content, media_type=self.media_type, headers=headers)


def page_routes(pages: dict[str, str]) -> list[Route]:
    """A route for each of `pages`, the path of a page to the name of its file; and one for all the files of `pages/`."""
    files = {path.name: StaticFile.read(path) for path in sorted(PAGES_DIR.iterdir()) if path.suffix in _MEDIA_TYPES}

    async def asset(http: Request) -> Response:
        name = http.path_params["name"]
        if name not in files:
            raise HTTPException(404)
        return await files[name](http)

    # One route: each would have a histogram of its own in /metrics.
    return [
        *(Route(path, files[name].__call__) for path, name in pages.items()),
        Route(f"{ASSETS_PATH}/{{name}}", asset),
    ]
