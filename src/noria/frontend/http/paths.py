"""Paths that authentication, access logs and traces treat differently from all others."""

from noria.frontend.access.api_keys import KeyScope

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/metrics", "/openapi.json", "/docs", "/live", "/"})
"""Routes that need no API key: none creates, lists or returns images."""

ASSETS_PATH = "/pages"
"""The files of the pages are served at /pages/NAME, also without a key."""

A1111_ROOT = "/sdapi/v1"
"""The routes of AUTOMATIC1111's API begin with it; their errors carry `detail`."""

_SCOPES: dict[str, KeyScope | None] = {
    "/t2i": "generate",
    "/v1/images/": "generate",
    "/v1/embeddings": "generate",
    "/v1/endpoints/": "generate",
    f"{A1111_ROOT}/": "generate",
    "/v1/jobs": "jobs",
    "/v1/models": None,
    "/v1/live": None,
}  # by the beginning of the path


def needed_scope(path: str) -> KeyScope | None:
    """Return the scope that an API key needs for a route that is not open; None: any key may use it."""
    (scope,) = (scope for beginning, scope in _SCOPES.items() if path.startswith(beginning))
    return scope
