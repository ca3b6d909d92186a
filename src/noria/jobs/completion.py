"""Reports each ended job: metrics, one line in the log, and a span in the trace of the request that created it.

Only `JobStore` calls this, after its conditional UPDATE has ended a job. Of all processes that race to end a job, the
one whose UPDATE took effect reports it, so each end is reported exactly once: success, failure, cancellation, expiry,
or too many losses.
"""

import msgspec
from opentelemetry.trace import Tracer

from noria.errors import InternalError, RequestCancelled
from noria.jobs.records import JobRecord
from noria.jobs.stored_request import StoredTextRequest, deserialize
from noria.jobs.tracing import job_span
from noria.observe.logs.request_log import LogPrompts, RequestLogRecord, request_fields
from noria.observe.metrics import declarations, outcomes
from noria.observe.request_scope import RequestScope
from noria.observe.traces.tracer import GLOBAL_TRACER, nanoseconds


def job_outcome(record: JobRecord) -> str:
    """`ok`, or the code of the `noria.errors` class that ended the job."""
    match record.status:
        case "succeeded":
            return outcomes.OK
        case "canceled":
            return RequestCancelled.code
    return record.error_code or InternalError.code


def stored_request_fields(record: JobRecord, log_prompts: LogPrompts) -> dict[str, object]:
    """The log fields that describe the request; only the model if the stored request cannot be decoded."""
    try:
        stored = deserialize(record.request)
    except msgspec.MsgspecError:
        return {"model": record.model, "model_version": record.version}
    if isinstance(stored, StoredTextRequest):
        return {
            "model": record.model,
            "model_version": record.version,
            "task": stored.request.task,
            "num_texts": stored.request.num_texts,
            "priority": "low",
        }
    return request_fields(stored.request, record.version, log_prompts)


class JobCompletionReporter:
    """Reports ended jobs; may be called from any thread."""

    def __init__(self, tracer: Tracer = GLOBAL_TRACER, log_prompts: LogPrompts = "off") -> None:
        self._tracer, self._log_prompts = tracer, log_prompts

    def report(self, record: JobRecord, log_record: RequestLogRecord | None = None) -> None:
        """Report that the job has just ended; `log_record` holds what the executor measured, if this process ran it."""
        assert record.completed_at is not None, record.status
        declarations.JOBS.labels(record.status).inc()
        outcome = job_outcome(record)
        outcomes.count_request(record.model, outcome)
        span = job_span(self._tracer, record, outcome)
        wait_ended_at = record.completed_at if record.started_at is None else record.started_at
        with RequestScope(record.id, span):
            (log_record or RequestLogRecord()).write(
                **stored_request_fields(record, self._log_prompts),
                request_id=record.id,
                job_id=record.id,
                attempt=record.attempt,
                job_status=record.status,
                # The times come from the clocks of several machines: clamp negative differences.
                waited_s=max(wait_ended_at - record.created_at, 0.0),
                seconds=max(record.completed_at - record.created_at, 0.0),
                key=record.made_by or None,
                outcome=outcome,
                error=record.error,
            )
        span.end(nanoseconds(max(record.completed_at, record.created_at)))
