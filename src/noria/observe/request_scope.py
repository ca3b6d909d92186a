"""The ids of the request that is being processed, shared by all its log lines and spans.

Set where processing begins (a front end's middleware, a job worker, an engine's thread) and read by logging and
tracing. A context variable follows `await` and `asyncio.create_task`, not threads: code that hands work to a thread
passes it on.
"""

from contextvars import ContextVar

from msgspec import Struct


class RequestContext(Struct, frozen=True):
    """The ids of one request."""

    request_id: str
    trace_id: str = ""  # 32 hexadecimal digits (W3C); empty without a trace
    span_id: str = ""  # 16 hexadecimal digits


CURRENT_REQUEST: ContextVar[RequestContext | None] = ContextVar("noria_request", default=None)
