"""The id of the request that is being processed, shared by all its log lines.

Set where processing begins (a front end's middleware, a job worker) and read by logging, together with OpenTelemetry's
current span. A context variable follows `await` and `asyncio.create_task`, not threads: code that hands work to a
thread passes it on.
"""

from contextvars import ContextVar

CURRENT_REQUEST: ContextVar[str | None] = ContextVar("noria_request", default=None)
