"""The spans of an engine: where a request's time went on the wheel, as children of the span that asked for it.

Made when the request has ended, from what was measured on its way, by the thread that tells its end: the wheel's own makes none.
A request that is in no trace, or in one that is not recorded, costs the look at its `traceparent`.
"""

import time

from noria.observe.traces.trace_context import parse
from noria.observe.traces.tracer import Attributes, AttributeValue, Tracer
from noria.protocol.request import ImageRequest, request_id_of
from noria.scheduling.types import RequestTimings


class StageSpans:
    """Makes them."""

    def __init__(self, tracer: Tracer, num_slots: int = 0) -> None:
        """`num_slots` are the wheel's."""
        self._tracer, self._num_slots = tracer, num_slots

    def record(
        self,
        request: ImageRequest,
        timings: RequestTimings,
        at: float,
        code: str | None = None,
        *,
        is_generated: bool = False,
    ) -> None:
        """The request has ended `at`, monotonic seconds; with `code`, in vain, and the last stage that it reached is what failed."""
        if not request.traceparent:
            return
        parent = parse([request.traceparent], [request.tracestate])
        if parent is None or not parent.is_sampled:
            return
        stages = _stages(timings, is_generated=is_generated)
        ended = time.time() - (time.monotonic() - at)
        began = ended - sum(seconds for _, seconds in stages)
        for number, (name, seconds) in enumerate(stages, 1):
            span = self._tracer.span(name, "internal", parent, self._attributes(name, request, timings), began)
            if code is not None and number == len(stages):
                span.fail(code)
            began += seconds
            span.end(began)

    def _attributes(self, stage: str, request: ImageRequest, timings: RequestTimings) -> Attributes:
        attributes: dict[str, AttributeValue] = {
            "noria.request_id": request_id_of(request.request_id),
            "gen_ai.request.model": request.model,
        }
        if stage == "denoise":
            attributes |= {
                "noria.steps": request.num_steps,
                "noria.scheduler": request.scheduler,
                "noria.mean_batch": timings.mean_batch,
                "noria.slots": self._num_slots,
            }
        return attributes


def _stages(timings: RequestTimings, *, is_generated: bool) -> list[tuple[str, float]]:
    """The stages that were reached, each with its seconds; they follow each other without gaps."""
    stages = [("queue", timings.queue_s)]
    if is_generated or timings.text_encode_s + timings.denoise_s > 0:
        stages += [("encode", timings.text_encode_s), ("denoise", timings.denoise_s)]
    if is_generated:
        stages.append(("decode", timings.decode_s))
    return stages
