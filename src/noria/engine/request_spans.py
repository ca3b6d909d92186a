"""Trace spans of a request's stages in the engine, as children of the span that submitted it.

They are made from the measured timings after the request has ended, by the thread that sends its last message, never by
the loop's. A request in no trace, or in one that is not sampled, costs only the parsing of its `traceparent`.
"""

import time
from collections.abc import Mapping
from types import MappingProxyType

from opentelemetry.trace import Tracer, get_current_span
from opentelemetry.util.types import AttributeValue

from noria.observe.traces.tracer import fail, nanoseconds, parse
from noria.protocol.request import EngineRequest
from noria.scheduling.types import RequestTimings


class StageSpans:
    """Records the spans of one engine's requests."""

    def __init__(self, tracer: Tracer, num_slots: int = 0) -> None:
        """`num_slots` is the engine's, an attribute of the denoise span."""
        self._tracer, self._num_slots = tracer, num_slots

    def record(
        self,
        request: EngineRequest,
        timings: RequestTimings,
        at: float,
        code: str | None = None,
        *,
        is_generated: bool = False,
        denoise_attributes: Mapping[str, AttributeValue] = MappingProxyType({}),
    ) -> None:
        """Record the stages of a request that ended `at` (monotonic seconds).

        With `code`, its last stage is marked as failed. `denoise_attributes` are added to the denoise span.
        """
        if not request.traceparent:
            return
        parent = parse([request.traceparent], [request.tracestate])
        if not get_current_span(parent).get_span_context().trace_flags.sampled:
            return
        stages = _stages(timings, is_generated=is_generated)
        ended = time.time() - (time.monotonic() - at)
        began = ended - sum(seconds for _, seconds in stages)
        for number, (name, seconds) in enumerate(stages, 1):
            attributes = self._attributes(name, request, timings, denoise_attributes)
            span = self._tracer.start_span(name, parent, attributes=attributes, start_time=nanoseconds(began))
            if code is not None and number == len(stages):
                fail(span, code)
            began += seconds
            span.end(nanoseconds(began))

    def _attributes(
        self, stage: str, request: EngineRequest, timings: RequestTimings, more: Mapping[str, AttributeValue]
    ) -> dict[str, AttributeValue]:
        attributes: dict[str, AttributeValue] = {
            "noria.request_id": request.request_id,
            "gen_ai.request.model": request.model,
        }
        if stage == "denoise":
            attributes |= {**more, "noria.mean_batch": timings.mean_batch, "noria.slots": self._num_slots}
        return attributes


def _stages(timings: RequestTimings, *, is_generated: bool) -> list[tuple[str, float]]:
    """The stages that the request reached, with their seconds; each begins when the one before it ends."""
    stages = [("queue", timings.queue_s)]
    if is_generated or timings.text_encode_s + timings.denoise_s > 0:
        stages += [("text_encode", timings.text_encode_s), ("denoise", timings.denoise_s)]
    if is_generated:
        stages.append(("decode", timings.decode_s))
    return stages
