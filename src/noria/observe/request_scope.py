"""Whose work is being done: the ids that every line of the log and every span of one request share.

Set where a request comes in (a front end's middleware, a job's runner, an engine's thread about to work for it) and read by the log and
the traces. A context variable follows `await` and `asyncio.create_task`, not threads: who hands work to one passes it on.
"""

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True)
class RequestContext:
    """The ids of one request."""

    request_id: str
    trace_id: str = ""  # W3C: 32 hexadecimal digits; empty without a trace
    span_id: str = ""  # 16 hexadecimal digits


CURRENT_REQUEST: ContextVar[RequestContext | None] = ContextVar("noria_request", default=None)
