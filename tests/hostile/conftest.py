"""Attacks on a running front end. Their bounds are requests, bytes and the service of others, not seconds."""

from frontends import folder, frontend_process, new_engine, serve  # noqa: F401 - fixtures
