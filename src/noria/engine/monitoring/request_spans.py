"""Trace spans of a request's stages in the engine, as children of the span that submitted it.

They are made from the measured timings after the request has ended, by the thread that makes its last message: the
sender's for images, the loop's for texts. A request in no trace, or in one that is not sampled, costs only the parsing
of its `traceparent`.
"""

import time

from opentelemetry.trace import Tracer, get_current_span
from opentelemetry.util.types import AttributeValue

from noria.engine.runtime import PreparedRequest
from noria.observe.traces.tracer import fail, nanoseconds, parse
from noria.protocol.request import AnyRequest
from noria.scheduling.types import Phase, RequestTimings


class StageSpans:
    """Records the spans of one engine's requests."""

    def __init__(self, tracer: Tracer, num_slots: int = 0) -> None:
        """`num_slots` is the engine's, an attribute of the span of the model calls."""
        self._tracer, self._num_slots = tracer, num_slots

    def record(
        self,
        request: AnyRequest,
        timings: RequestTimings,
        at: float,
        code: str | None = None,
        prepared: PreparedRequest | None = None,
        *,
        is_generated: bool = False,
    ) -> None:
        """Record the stages of a request that ended `at` (monotonic seconds); of one not `prepared`, the queue.

        With `code`, its last stage is marked as failed.
        """
        if not request.traceparent:
            return
        parent = parse([request.traceparent], [request.tracestate])
        if not get_current_span(parent).get_span_context().trace_flags.sampled:
            return
        stages = _stages(timings, prepared, is_generated=is_generated)
        ended = time.time() - (time.monotonic() - at)
        began = ended - sum(seconds for _, seconds in stages)
        for number, (name, seconds) in enumerate(stages, 1):
            attributes: dict[str, AttributeValue] = {
                "noria.request_id": request.request_id,
                "gen_ai.request.model": request.model,
            }
            if prepared is not None and name == prepared.stages["steps"]:
                attributes |= prepared.span_attributes
                attributes |= {"noria.mean_batch": timings.mean_batch, "noria.slots": self._num_slots}
            span = self._tracer.start_span(name, parent, attributes=attributes, start_time=nanoseconds(began))
            if code is not None and number == len(stages):
                fail(span, code)
            began += seconds
            span.end(nanoseconds(began))


def _stages(
    timings: RequestTimings, prepared: PreparedRequest | None, *, is_generated: bool
) -> list[tuple[str, float]]:
    """The stages that the request reached, with their seconds; each begins when the one before it ends."""
    stages = [("queue", timings.queue_s)]
    if prepared is not None and timings.image_encode_s > 0:
        stages += _named(prepared, ("encodes", timings.image_encode_s))
    if prepared is not None and (is_generated or timings.text_encode_s + timings.denoise_s > 0):
        stages += _named(prepared, ("joins", timings.text_encode_s), ("steps", timings.denoise_s))
    if prepared is not None and is_generated:
        stages += _named(prepared, ("decodes", timings.decode_s))
    return stages


def _named(prepared: PreparedRequest, *phases: tuple[Phase, float]) -> list[tuple[str, float]]:
    """The phases that this kind of request has, by the names of its spans."""
    return [(prepared.stages[phase], seconds) for phase, seconds in phases if phase in prepared.stages]
