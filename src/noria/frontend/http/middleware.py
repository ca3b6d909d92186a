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
from collections.abc import Awaitable, Callable, Iterator

from opentelemetry.trace import INVALID_SPAN, Span, Tracer
from prometheus_client import Counter, Histogram
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from noria.errors import InternalError, NoriaError
from noria.frontend.engines.versions.version_choice import Choice, RequestVersions
from noria.frontend.http import request_spans
from noria.frontend.http.request_head import RequestHeaders
from noria.observe.logs.request_log import RequestLogRecord
from noria.observe.logs.setup import log_fields
from noria.observe.metrics import declarations
from noria.observe.metrics.section import add_all
from noria.observe.request_scope import RequestScope
from noria.observe.traces.tracer import GLOBAL_TRACER, fail, may_record

log = logging.getLogger("noria.access")

_VALID_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_MAX_CLIENT_CHARS = 64  # longer than an address; a trusted proxy may pass on whatever its client sent
_NOSNIFF = (b"x-content-type-options", b"nosniff")  # else a browser may take JSON with a client's text in it for a page


def request_id_of(headers: RequestHeaders) -> str:
    """Return the client's X-Request-Id if it is short and plain enough for logs and headers, else a new id."""
    client_id = headers.get("x-request-id", "")
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
    unexpected exception. The traceback goes to the log. `is_untraced` says of a method and a path whether its requests
    have no span. Requests with the same value of `sticky_header` are answered by the same version of a model.
    """

    def __init__(
        self,
        app: ASGIApp,
        error_response: Callable[[Request, NoriaError | HTTPException], Response],
        internal_error_response: Callable[[Request], Response],
        is_untraced: Callable[[str, str], bool],
        tracer: Tracer = GLOBAL_TRACER,
        sticky_header: str = "",
    ) -> None:
        self._app, self._sticky_header = app, sticky_header
        self._error_response = error_response
        self._internal_error_response = internal_error_response
        self._is_untraced, self._tracer = is_untraced, tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        started = time.perf_counter()
        headers = RequestHeaders(scope["headers"])
        request_id = request_id_of(headers)
        versions, log_record = open_versions(headers, self._sticky_header), RequestLogRecord()
        state = {"headers": headers, "request_id": request_id, "versions": versions, "log_record": log_record}
        scope["state"] = scope.get("state", {}) | state
        is_traced = "traceparent" in headers or may_record(self._tracer)
        span = self._begin_span(scope, headers, request_id) if is_traced else INVALID_SPAN
        status: int | None = None

        def send_with_request_id(message: Message) -> Awaitable[None]:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                versions.answer()
                message["headers"] += (b"x-request-id", request_id.encode("ascii")), _NOSNIFF
                message["headers"] += version_headers(versions.choice)
                if span is not INVALID_SPAN:
                    request_spans.add_server_timing(span, message)
            return send(message)

        with RequestScope(request_id, span), versions:
            try:
                try:
                    await self._app(scope, receive, send_with_request_id)
                except (NoriaError, HTTPException) as error:
                    if status is not None:  # the response has begun
                        raise
                    await self._send_error(error, scope, receive, send_with_request_id)
            except Exception:
                log.exception("%s failed with an unexpected exception", request_id)
                scope["state"]["error_code"] = InternalError.code
                fail(span, InternalError.code)  # even if a successful status was already sent
                if status is None:
                    await self._send_error(None, scope, receive, send_with_request_id)
            finally:
                status = status or 499  # none: cancelled by a disconnect or by the end of the server
                record_http_request(scope, status, time.perf_counter() - started, log_record)
                if span is not INVALID_SPAN:
                    request_spans.finish(span, scope, status)

    def _begin_span(self, scope: Scope, headers: RequestHeaders, request_id: str) -> Span:
        if self._is_untraced(scope["method"], scope["path"]):
            return INVALID_SPAN
        return request_spans.begin(self._tracer, scope, headers, request_id)

    async def _send_error(
        self, error: NoriaError | HTTPException | None, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Send the response to an error; None: an unexpected exception."""
        http, versions = Request(scope, receive), scope["state"]["versions"]
        versions.error = InternalError("") if error is None else error if isinstance(error, NoriaError) else None
        response = self._internal_error_response(http) if error is None else self._error_response(http, error)
        await response(scope, receive, send)


def open_versions(headers: RequestHeaders, sticky_header: str) -> RequestVersions:
    """Return the versions of a request with these headers; an empty `sticky_header` is none."""
    sticky_key = headers.get(sticky_header.lower(), "") if sticky_header else ""
    return RequestVersions(sticky_key, is_sticky=bool(sticky_key))


def version_headers(choice: Choice | None) -> list[tuple[bytes, bytes]]:
    """Return the headers that say which version answered, if one was needed; and which deployment, if it has one."""
    if choice is None:
        return []
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
    add_all((requests, 1), (seconds, duration_s))
    level = logging.DEBUG if getattr(route, "is_polled", False) else logging.INFO
    if not log_record and not log.isEnabledFor(level):
        return
    target = scope["raw_path"].decode("latin-1")  # percent-encoded, without the query
    state = scope["state"]
    key = state["api_client"].name if "api_client" in state else None
    client = scope.get("client")
    named = {
        "request_id": state["request_id"],
        "method": scope["method"],
        "path": target,
        "status": status,
        "seconds": duration_s,
        "key": key,
        "client": client[0][:_MAX_CLIENT_CHARS] if client else None,
    }
    if log_record:
        log_record.write(**named)
        return
    outcome = {"outcome": state.get("error_code"), "error": state.get("logged_error"), "job_id": state.get("job_id")}
    log_fields(log, level, f"{scope['method']} {target} {status}", named | outcome, event="access")
