"""What the spans of a front end say: HTTP's in OpenTelemetry's words for it, those about images in its words for generative models.

https://opentelemetry.io/docs/specs/semconv/http/http-spans/ and https://opentelemetry.io/docs/specs/semconv/gen-ai/; what they have no word
for begins with `noria.`. Prompts, negative prompts and queries of URLs, which may be secrets, are in none of them.
"""

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Message, Scope

from noria.frontend.http.quotas import OPEN_PATHS
from noria.observe.traces.trace_context import parse
from noria.observe.traces.tracer import NO_SPAN, NO_TRACER, AttributeValue, NoSpan, Span, Tracer
from noria.protocol.request import ImageRequest

METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
"""Those that have a name in metrics and spans: callers may make up others without end."""

_UNTRACED_PATHS = OPEN_PATHS | {"/live", "/v1/live"}  # probes, pages, and a stream that lasts as long as somebody looks
_UNTRACED_PREFIX = "/pages/"
# What nobody was to blame for but the load, us, or a client that left. Other 4xx are the caller's mistakes, and the conventions have
# their spans be no errors of the server's.
_FAILURE_STATUSES = frozenset({429, 499})


def begin(tracer: Tracer, scope: Scope, headers: Headers, request_id: str) -> Span:
    """The span of an HTTP request that has come in, on behalf of the caller's if it came with one."""
    path: str = scope["path"]
    if path in _UNTRACED_PATHS or path.startswith(_UNTRACED_PREFIX):
        return NO_SPAN
    traceparents = headers.getlist("traceparent")
    parent = parse(traceparents, headers.getlist("tracestate")) if traceparents else None
    if tracer is NO_TRACER:  # most servers: not even the attributes are made
        return NoSpan(parent) if parent is not None else NO_SPAN
    method: str = scope["method"]
    attributes: dict[str, AttributeValue] = {
        "url.path": path,
        "url.scheme": scope["scheme"],
        "noria.request_id": request_id,
    }
    if method in METHODS:
        attributes["http.request.method"] = method
    else:
        attributes |= {"http.request.method": "_OTHER", "http.request.method_original": method}
    return tracer.span(_name(scope), "server", parent, attributes)


def add_server_timing(span: Span, response: Message) -> None:
    """Have the head of the response say which span it was, where there is one to be found: browsers' tools show Server-Timing."""
    if span.is_recording and span.context is not None and span.context.is_sampled:
        headers = MutableHeaders(scope=response)
        existing = headers.get("server-timing")
        entry = f'traceparent;desc="{span.context.traceparent}"'
        headers["Server-Timing"] = entry if existing is None else f"{existing}, {entry}"


def finish(span: Span, scope: Scope, status: int) -> None:
    """The request was answered with `status`; 499 where its client, or we, left before it was."""
    if not span.is_recording:
        return
    attributes: dict[str, AttributeValue] = {"http.response.status_code": status}
    if (route := scope.get("route")) is not None:
        attributes["http.route"] = route.path
        span.rename(f"{_name(scope)} {route.path}")
    state = scope["state"]
    if "caller" in state and state["caller"].name is not None:
        attributes["noria.key"] = state["caller"].name
    code = state.get("error_code")
    if code is not None:
        attributes["noria.outcome"] = code
    span.set_attributes(attributes)
    if status in _FAILURE_STATUSES or status >= 500:
        span.fail(code or str(status))
    span.end()


def _name(scope: Scope) -> str:
    """Until its route is known; names are few, so methods that HTTP has not are none."""
    method: str = scope["method"]
    return method if method in METHODS else "HTTP"


def add_request_attributes(span: Span, request: ImageRequest) -> None:
    """Say what was asked for."""
    if not span.is_recording:
        return
    attributes: dict[str, AttributeValue] = {
        "gen_ai.operation.name": "generate_content",
        "gen_ai.output.type": "image",
        "gen_ai.provider.name": "noria",
        "gen_ai.request.model": request.model,
        "gen_ai.request.seed": request.seed,
        "noria.scheduler": request.scheduler,
        "noria.steps": request.num_steps,
        "noria.guidance_scale": request.guidance_scale,
        "noria.width_px": request.width_px,
        "noria.height_px": request.height_px,
        "noria.images": request.num_images,
        "noria.priority": request.priority,
    }
    if request.num_images > 1:
        attributes["gen_ai.request.choice.count"] = request.num_images
    if request.deadline_s is not None:
        attributes["noria.deadline_s"] = request.deadline_s
    span.set_attributes(attributes)
