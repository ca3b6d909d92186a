"""What is told of a job that has ended: counts, a line in the log, and a span in the trace of who made it.

`Store` calls this where its conditional UPDATE has ended a job, and nobody else does. So of all processes that race for an end the one
that won it tells, exactly once: a job that was drawn, cancelled while it waited or was drawn, that expired, or was lost too often.
"""

import msgspec
from msgspec import Struct

from noria.errors import InternalError, RequestCancelled
from noria.jobs.records import JobRecord
from noria.jobs.tracing import life_span
from noria.observe import metrics, outcomes
from noria.observe.requests import LogPrompts, Note, said_of
from noria.observe.traces import NO_TRACER, Tracer, working_for
from noria.request import ImageRequest


class _Kept(Struct, frozen=True):
    request: ImageRequest


def outcome_of(record: JobRecord) -> str:
    """`ok`, or the code of `noria.errors` that an ended job ended with."""
    match record.status:
        case "succeeded":
            return outcomes.OK
        case "canceled":
            return RequestCancelled.code
    return record.error_code or InternalError.code


def asked_for(record: JobRecord, prompts: LogPrompts) -> dict[str, object]:
    """The fields of the log's line that tell what was asked for; of a request that another Noria kept, perhaps the model only."""
    try:
        kept = msgspec.json.decode(record.request, type=_Kept)
    except msgspec.DecodeError:
        return {"model": record.model, "model_version": record.version}
    return said_of(kept.request, record.version, prompts)


class Ends:
    """Tells of jobs' ends, from any thread."""

    def __init__(self, tracer: Tracer = NO_TRACER, log_prompts: LogPrompts = "off") -> None:
        self._tracer, self._log_prompts = tracer, log_prompts

    def tell(self, record: JobRecord, note: Note | None = None) -> None:
        """`record` has just ended; `note` is what is known of its drawing, from who drew it."""
        assert record.completed_at is not None, record.status
        metrics.JOBS.labels(record.status).inc()
        outcome = outcome_of(record)
        outcomes.count(record.model, outcome)
        span = life_span(self._tracer, record, outcome)
        begun_or_ended = record.completed_at if record.started_at is None else record.started_at
        with working_for(record.id, span):
            (note or Note()).write(
                **asked_for(record, self._log_prompts),
                request_id=record.id,
                job_id=record.id,
                attempt=record.attempt,
                job_status=record.status,
                # Clocks of several machines meet here: a negative time would be nonsense.
                waited_s=max(begun_or_ended - record.created_at, 0.0),
                seconds=max(record.completed_at - record.created_at, 0.0),
                key=record.made_by or None,
                outcome=outcome,
                error=record.error,
            )
        span.end(max(record.completed_at, record.created_at))
