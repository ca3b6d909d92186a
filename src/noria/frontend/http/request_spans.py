"""The span of an HTTP request, with the attributes of OpenTelemetry's semantic conventions.

https://opentelemetry.io/docs/specs/semconv/http/http-spans/. Attributes that the conventions do not have begin with
`noria.`. No span contains the query of a URL, which may be a secret.
"""

from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, Tracer
from opentelemetry.util.types import AttributeValue
from starlette.datastructures import MutableHeaders
from starlette.types import Message, Scope

from noria.frontend.http.request_head import RequestHeaders
from noria.observe.traces.tracer import fail, parse, trace_headers

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
"""The methods named in metrics and spans. Clients may invent others, without end."""

# 4xx that are no mistake of the client: overload and disconnects. The conventions set no error on a server's span for
# other 4xx.
_FAILURE_STATUSES = frozenset({429, 499})


def begin(tracer: Tracer, scope: Scope, headers: RequestHeaders, request_id: str) -> Span:
    """Start the span of a request, as a child of the client's span if its headers name one."""
    path: str = scope["path"]
    method: str = scope["method"]
    parent = Context()
    if "traceparent" in headers:
        parent = parse(headers.getlist("traceparent"), headers.getlist("tracestate"))
    attributes: dict[str, AttributeValue] = {
        "url.path": path,
        "url.scheme": scope["scheme"],
        "noria.request_id": request_id,
    }
    if method in METHODS:
        attributes["http.request.method"] = method
    else:
        attributes |= {"http.request.method": "_OTHER", "http.request.method_original": method}
    return tracer.start_span(_name(scope), parent, SpanKind.SERVER, attributes)


def add_server_timing(span: Span, response: Message) -> None:
    """Add a recorded, sampled span's context to the header Server-Timing, which browsers' tools show."""
    if span.is_recording() and span.get_span_context().trace_flags.sampled:
        headers = MutableHeaders(scope=response)
        existing = headers.get("server-timing")
        entry = 'traceparent;desc="{traceparent}"'.format(**trace_headers(span))
        headers["Server-Timing"] = entry if existing is None else f"{existing}, {entry}"


def finish(span: Span, scope: Scope, status: int) -> None:
    """End the span with the response's status; 499 if a disconnect or the server's end prevented a response."""
    if not span.is_recording():
        return
    attributes: dict[str, AttributeValue] = {"http.response.status_code": status}
    if (route := scope.get("route")) is not None:
        attributes["http.route"] = route.path
        span.update_name(f"{_name(scope)} {route.path}")
    state = scope["state"]
    if "api_client" in state and state["api_client"].name is not None:
        attributes["noria.api_key.name"] = state["api_client"].name
    code = state.get("error_code")
    if code is not None:
        attributes["noria.outcome"] = code
    span.set_attributes(attributes)
    if status in _FAILURE_STATUSES or status >= 500:
        fail(span, code or str(status))
    span.end()


def _name(scope: Scope) -> str:
    """Return the span's name while its route is unknown. Unknown methods become "HTTP", so that names stay few."""
    method: str = scope["method"]
    return method if method in METHODS else "HTTP"
