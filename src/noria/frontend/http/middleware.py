"""Around every HTTP request: its id, its metrics, its line in the log, an answer when our own code breaks; and who asks.

A request for images has the line of `observe/logs/request_log.py`, with status and seconds; every other the access log's.

Pure ASGI: Starlette's `@app.middleware` would run the application in a task of its own, behind streams that hide the client's
leaving.
"""

import logging
import re
import time
import uuid
from collections.abc import Callable

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from noria.errors import InternalError
from noria.frontend.http import request_spans
from noria.frontend.http.quotas import ClientDirectory
from noria.frontend.routes.static_pages import ASSETS_PATH
from noria.observe.logs.log_record import fields
from noria.observe.logs.request_log import RequestLogRecord, request_log_scope
from noria.observe.metrics import declarations
from noria.observe.traces.tracer import NO_TRACER, Tracer, request_scope

log = logging.getLogger("noria.access")

_VALID_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
# Asked every few seconds, for ever, or by the dozen whenever a page is opened: not worth a line each.
_DEBUG_LEVEL_PATHS = frozenset({"/healthz", "/readyz", "/metrics", f"{ASSETS_PATH}/{{name}}"})


def request_id_of(headers: Headers) -> str:
    """The client's own X-Request-Id if it is one that logs and headers bear, else a new one."""
    client_id = headers.get("x-request-id", "")
    return client_id if _VALID_REQUEST_ID.fullmatch(client_id) else uuid.uuid4().hex


class ObservabilityMiddleware:
    """Puts `request_id` on the request's state and X-Request-Id on its response; counts, times, traces and logs it.

    `crashed` makes the response to an exception that nobody mapped; its traceback goes to the log only.
    """

    def __init__(
        self, app: ASGIApp, internal_error_response: Callable[[str], Response], tracer: Tracer = NO_TRACER
    ) -> None:
        self._app = app
        self._internal_error_response = internal_error_response
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        headers = Headers(scope=scope)
        request_id = scope.setdefault("state", {})["request_id"] = request_id_of(headers)
        span = request_spans.begin(self._tracer, scope, headers, request_id)
        status: int | None = None

        async def send_with_request_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
                request_spans.add_server_timing(span, message)
            await send(message)

        with request_scope(request_id, span), request_log_scope() as log_record:
            try:
                await self._app(scope, receive, send_with_request_id)
            except Exception:
                log.exception("%s broke", request_id)
                scope["state"]["error_code"] = InternalError.code
                span.fail(InternalError.code)  # also where a status was sent that says otherwise
                if status is None:
                    await self._internal_error_response(request_id)(scope, receive, send_with_request_id)
            finally:
                status = status or 499  # none: cancelled, the client or we are leaving
                _record_http_request(scope, status, time.perf_counter() - started, log_record)
                request_spans.finish(span, scope, status)


class AuthMiddleware:
    """Puts `caller` on the request's state; goes around a route, inside what turns errors into responses. Raises Unauthorized."""

    def __init__(self, app: ASGIApp, clients: ClientDirectory) -> None:
        self._app, self._clients = app, clients

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, if its key is known."""
        scope["state"]["caller"] = self._clients.find(Headers(scope=scope))
        await self._app(scope, receive, send)


def _record_http_request(scope: Scope, status: int, duration_s: float, log_record: RequestLogRecord) -> None:
    route = scope.get("route")
    path = "other" if route is None else route.path
    method = scope["method"] if scope["method"] in request_spans.METHODS else "other"
    declarations.HTTP_REQUESTS.labels(method, path, str(status)).inc()
    declarations.HTTP_REQUEST_SECONDS.labels(method, path).observe(duration_s)
    target = scope["raw_path"].decode("latin-1")  # still percent-encoded, and without its query
    state = scope["state"]
    key = state["caller"].name if "caller" in state else None
    log_fields = {
        "request_id": state["request_id"],
        "method": scope["method"],
        "path": target,
        "status": status,
        "seconds": duration_s,
        "key": key,
    }
    if log_record.fields:
        log_record.write(**log_fields)
        return
    level = logging.DEBUG if path in _DEBUG_LEVEL_PATHS else logging.INFO
    extra = fields(event="access", **log_fields, outcome=state.get("error_code"), job_id=state.get("job_id"))
    log.log(level, "%s %s %d", scope["method"], target, status, extra=extra)
