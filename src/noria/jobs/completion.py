"""What is told of a job that has ended: counts, a line in the log, and a span in the trace of who made it.

`Store` calls this where its conditional UPDATE has ended a job, and nobody else does. So of all processes that race for an end the one
that won it tells, exactly once: a job that was drawn, cancelled while it waited or was drawn, that expired, or was lost too often.
"""

import msgspec
from msgspec import Struct

from noria.errors import InternalError, RequestCancelled
from noria.jobs.records import JobRecord
from noria.jobs.tracing import job_span
from noria.observe.logs.request_log import LogPrompts, RequestLogRecord, request_fields
from noria.observe.metrics import declarations, outcomes
from noria.observe.traces.tracer import NO_TRACER, Tracer, request_scope
from noria.protocol.request import ImageRequest


class _StoredRequest(Struct, frozen=True):
    request: ImageRequest


def job_outcome(record: JobRecord) -> str:
    """`ok`, or the code of `noria.errors` that an ended job ended with."""
    match record.status:
        case "succeeded":
            return outcomes.OK
        case "canceled":
            return RequestCancelled.code
    return record.error_code or InternalError.code


def stored_request_fields(record: JobRecord, log_prompts: LogPrompts) -> dict[str, object]:
    """The fields of the log's line that tell what was asked for; of a request that another Noria kept, perhaps the model only."""
    try:
        stored = msgspec.json.decode(record.request, type=_StoredRequest)
    except msgspec.DecodeError:
        return {"model": record.model, "model_version": record.version}
    return request_fields(stored.request, record.version, log_prompts)


class JobCompletionReporter:
    """Tells of jobs' ends, from any thread."""

    def __init__(self, tracer: Tracer = NO_TRACER, log_prompts: LogPrompts = "off") -> None:
        self._tracer, self._log_prompts = tracer, log_prompts

    def report(self, record: JobRecord, log_record: RequestLogRecord | None = None) -> None:
        """`record` has just ended; `note` is what is known of its drawing, from who drew it."""
        assert record.completed_at is not None, record.status
        declarations.JOBS.labels(record.status).inc()
        outcome = job_outcome(record)
        outcomes.count_request(record.model, outcome)
        span = job_span(self._tracer, record, outcome)
        wait_ended_at = record.completed_at if record.started_at is None else record.started_at
        with request_scope(record.id, span):
            (log_record or RequestLogRecord()).write(
                **stored_request_fields(record, self._log_prompts),
                request_id=record.id,
                job_id=record.id,
                attempt=record.attempt,
                job_status=record.status,
                # Clocks of several machines meet here: a negative time would be nonsense.
                waited_s=max(wait_ended_at - record.created_at, 0.0),
                seconds=max(record.completed_at - record.created_at, 0.0),
                key=record.made_by or None,
                outcome=outcome,
                error=record.error,
            )
        span.end(max(record.completed_at, record.created_at))
