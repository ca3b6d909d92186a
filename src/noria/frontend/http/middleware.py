"""Middleware around every HTTP request: request id, metrics, span, log line, response to unexpected exceptions.

An image request has one line in the log of `observe/logs/request_log.py`, with status and duration; any other request
has one in the access log.

This is plain ASGI. Starlette's `@app.middleware` runs the application in a task of its own, whose streams hide a
disconnect.
"""

import functools
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator

from opentelemetry.trace import Tracer
from prometheus_client import Counter, Histogram
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from noria.errors import InternalError, NoriaError
from noria.frontend.engines.version_choice import Choice, RequestVersions
from noria.frontend.http import request_spans
from noria.frontend.http.paths import ASSETS_PATH, HEALTH_PATHS, METRICS_TARGETS_PATH
from noria.observe.logs.log_record import fields
from noria.observe.logs.request_log import RequestLogRecord
from noria.observe.metrics import declarations
from noria.observe.traces.tracer import GLOBAL_TRACER, RequestScope, fail

log = logging.getLogger("noria.access")

_VALID_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
# Requested every few seconds, or by the dozen when a page opens: logged at debug level.
_DEBUG_LEVEL_PATHS = HEALTH_PATHS | {"/metrics", METRICS_TARGETS_PATH, f"{ASSETS_PATH}/{{name}}"}

_MAX_CLIENT_CHARS = 64  # longer than an address; a trusted proxy may pass on whatever its client sent
_NOSNIFF = (b"x-content-type-options", b"nosniff")  # else a browser may take JSON with a client's text in it for a page


def request_id_of(raw_headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the client's X-Request-Id if it is short and plain enough for logs and headers, else a new id."""
    client_id = (
        dict(raw_headers).get(b"x-request-id", b"").decode("latin-1")
    )  # Starlette's look-up takes five times as long
    return client_id if _VALID_REQUEST_ID.fullmatch(client_id) else next(_new_ids)


def _random_ids() -> Iterator[str]:
    """Yield random ids; one system call makes 256 of them."""
    while True:
        random_bytes = os.urandom(16 * 256)
        for start in range(0, len(random_bytes), 16):
            yield random_bytes[start : start + 16].hex()


_new_ids = _random_ids()


class ObservabilityMiddleware:
    """Counts, times, traces and logs each request; adds its id to its state and response, and nosniff to the latter.

    `error_response` makes the response to an error of ours or of the routing; `internal_error_response` that to an
    unexpected exception. The traceback goes to the log. Requests with the same value of `sticky_header` are answered
    by the same version of a model.
    """

    def __init__(
        self,
        app: ASGIApp,
        error_response: Callable[[Request, NoriaError | HTTPException], Response],
        internal_error_response: Callable[[Request], Response],
        tracer: Tracer = GLOBAL_TRACER,
        sticky_header: str = "",
    ) -> None:
        self._app, self._sticky_header = app, sticky_header
        self._error_response = error_response
        self._internal_error_response = internal_error_response
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        headers = Headers(scope=scope)
        request_id = scope.setdefault("state", {})["request_id"] = request_id_of(scope["headers"])
        span = request_spans.begin(self._tracer, scope, headers, request_id)
        status: int | None = None

        async def send_with_request_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] += (b"x-request-id", request_id.encode("ascii")), _NOSNIFF
                if (choice := versions.choice) is not None:
                    message["headers"] += version_headers(choice)
                request_spans.add_server_timing(span, message)
            await send(message)

        versions = scope["state"]["versions"] = open_versions(headers, self._sticky_header)
        with RequestScope(request_id, span), RequestLogRecord() as log_record, versions:
            try:
                try:
                    await self._app(scope, receive, send_with_request_id)
                except (NoriaError, HTTPException) as error:
                    if status is not None:  # the response has begun
                        raise
                    response = self._error_response(Request(scope, receive), error)
                    await response(scope, receive, send_with_request_id)
            except Exception:
                log.exception("%s failed with an unexpected exception", request_id)
                scope["state"]["error_code"] = InternalError.code
                fail(span, InternalError.code)  # even if a successful status was already sent
                if status is None:
                    response = self._internal_error_response(Request(scope, receive))
                    await response(scope, receive, send_with_request_id)
            finally:
                status = status or 499  # none: cancelled by a disconnect or by the end of the server
                record_http_request(scope, status, time.perf_counter() - started, log_record)
                request_spans.finish(span, scope, status)


def open_versions(headers: Headers, sticky_header: str) -> RequestVersions:
    """Return the versions of a request with these headers; an empty `sticky_header` is none."""
    sticky_key = headers.get(sticky_header) if sticky_header else None
    # Not by the request's id, which the client may choose, and with it the canary.
    return RequestVersions(sticky_key or next(_new_ids), is_sticky=bool(sticky_key))


def version_headers(choice: Choice) -> list[tuple[bytes, bytes]]:
    """Return the headers that say which version answered, and which deployment, if it was deployed."""
    if choice.target is None:
        return [(b"x-noria-model-version", choice.version.encode("ascii"))]
    return [
        (b"x-noria-model-version", choice.target.version.encode("ascii")),
        (b"x-noria-deployment", str(choice.target.deployment).encode("ascii")),
    ]


@functools.cache
def _series(method: str, path: str, status: int) -> tuple[Counter, Histogram]:
    labels = method, path
    return declarations.HTTP_REQUESTS.labels(*labels, str(status)), declarations.HTTP_REQUEST_SECONDS.labels(*labels)


def record_http_request(scope: Scope, status: int, duration_s: float, log_record: RequestLogRecord) -> None:
    """Count and log a request that has ended; `scope` is as of ASGI."""
    route = scope.get("route")
    path = "other" if route is None else route.path
    method = scope["method"] if scope["method"] in request_spans.METHODS else "other"
    requests, seconds = _series(method, path, status)
    requests.inc()
    seconds.observe(duration_s)
    target = scope["raw_path"].decode("latin-1")  # percent-encoded, without the query
    state = scope["state"]
    key = state["api_client"].name if "api_client" in state else None
    client = scope.get("client")
    log_fields = {
        "request_id": state["request_id"],
        "method": scope["method"],
        "path": target,
        "status": status,
        "seconds": duration_s,
        "key": key,
        "client": client[0][:_MAX_CLIENT_CHARS] if client else None,
    }
    if log_record.fields:
        log_record.write(**log_fields)
        return
    level = logging.DEBUG if path in _DEBUG_LEVEL_PATHS else logging.INFO
    extra = fields(event="access", **log_fields, outcome=state.get("error_code"), job_id=state.get("job_id"))
    log.log(level, "%s %s %d", scope["method"], target, status, extra=extra)
