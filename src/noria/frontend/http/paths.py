"""Paths that authentication, access logs and traces treat differently from all others."""

OPEN_PATHS = frozenset({"/healthz", "/readyz", "/metrics", "/openapi.json", "/docs", "/live", "/"})
"""Routes that need no API key: none creates, lists or returns images."""

ASSETS_PATH = "/pages"
"""The files of the pages are served at /pages/NAME, also without a key."""

A1111_ROOT = "/sdapi/v1"
"""The routes of AUTOMATIC1111's API begin with it; their errors carry `detail`."""
