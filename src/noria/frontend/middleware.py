"""Around every HTTP request: its id, its metrics, its line in the log, an answer when our own code breaks; and who asks.

A request for images has the line of `observe/requests.py`, with status and seconds; every other the access log's.

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
from noria.frontend import spans
from noria.frontend.keys import Callers
from noria.frontend.site import ASSETS
from noria.observe import metrics
from noria.observe.lines import fields
from noria.observe.requests import Note, noting
from noria.observe.traces import NO_TRACER, Tracer, working_for

log = logging.getLogger("noria.access")

_SANE_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
# Asked every few seconds, for ever, or by the dozen whenever a page is opened: not worth a line each.
_QUIET = frozenset({"/healthz", "/readyz", "/metrics", f"{ASSETS}/{{name}}"})


def request_id_of(headers: Headers) -> str:
    """The client's own X-Request-Id if it is one that logs and headers bear, else a new one."""
    sent = headers.get("x-request-id", "")
    return sent if _SANE_ID.fullmatch(sent) else uuid.uuid4().hex


class RequestLog:
    """Puts `request_id` on the request's state and X-Request-Id on its response; counts, times, traces and logs it.

    `crashed` makes the response to an exception that nobody mapped; its traceback goes to the log only.
    """

    def __init__(self, app: ASGIApp, crashed: Callable[[str], Response], tracer: Tracer = NO_TRACER) -> None:
        self._app = app
        self._crashed = crashed
        self._tracer = tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.perf_counter()
        headers = Headers(scope=scope)
        request_id = scope.setdefault("state", {})["request_id"] = request_id_of(headers)
        span = spans.begin(self._tracer, scope, headers, request_id)
        status: int | None = None

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
                spans.tell(span, message)
            await send(message)

        with working_for(request_id, span), noting() as note:
            try:
                await self._app(scope, receive, send_named)
            except Exception:
                log.exception("%s broke", request_id)
                scope["state"]["error_code"] = InternalError.code
                span.fail(InternalError.code)  # also where a status was sent that says otherwise
                if status is None:
                    await self._crashed(request_id)(scope, receive, send_named)
            finally:
                status = status or 499  # none: cancelled, the client or we are leaving
                _account(scope, status, time.perf_counter() - started, note)
                spans.finish(span, scope, status)


class Gate:
    """Puts `caller` on the request's state; goes around a route, inside what turns errors into responses. Raises Unauthorized."""

    def __init__(self, app: ASGIApp, callers: Callers) -> None:
        self._app, self._callers = app, callers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, if its key is known."""
        scope["state"]["caller"] = self._callers.find(Headers(scope=scope))
        await self._app(scope, receive, send)


def _account(scope: Scope, status: int, seconds: float, note: Note) -> None:
    route = scope.get("route")
    path = "other" if route is None else route.path
    method = scope["method"] if scope["method"] in spans.METHODS else "other"
    metrics.HTTP_REQUESTS.labels(method, path, str(status)).inc()
    metrics.HTTP_REQUEST_SECONDS.labels(method, path).observe(seconds)
    target = scope["raw_path"].decode("latin-1")  # still percent-encoded, and without its query
    state = scope["state"]
    key = state["caller"].name if "caller" in state else None
    said = {
        "request_id": state["request_id"],
        "method": scope["method"],
        "path": target,
        "status": status,
        "seconds": seconds,
        "key": key,
    }
    if note.said:
        note.write(**said)
        return
    level = logging.DEBUG if path in _QUIET else logging.INFO
    line = fields(event="access", **said, outcome=state.get("error_code"), job_id=state.get("job_id"))
    log.log(level, "%s %s %d", scope["method"], target, status, extra=line)
