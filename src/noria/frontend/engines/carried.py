"""What a request has already, of the engines that have handed it over; the front end keeps it until the request ends.

So engines never meet, and an engine that is lost after a move costs only the steps since then.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import msgspec

from noria.errors import GenerationFailed
from noria.frontend.engines.client import AttemptMovedError, EngineClient, StateRefusedError
from noria.frontend.engines.results import EngineResult, OnUpdate, RawImage
from noria.observe.logs.log_record import fields
from noria.observe.metrics import declarations
from noria.protocol.messages import ImageState, Resume, Timings
from noria.protocol.request import AnyRequest

_log = logging.getLogger("noria.frontend")


@dataclass(frozen=True)
class CarriedImages:
    """The images of a request that are done, and how far others are."""

    was_moved: bool = False
    images: Mapping[int, RawImage] = field(default_factory=dict)  # by index
    states: Mapping[int, tuple[ImageState, memoryview]] = field(default_factory=dict)  # by index
    model_version: str = ""  # of the model that computed `states`
    timings: Timings | None = None  # of all engines before
    predicted_s: float | None = None  # by the first engine

    async def submit(
        self, engine: EngineClient, request: AnyRequest, on_update: OnUpdate | None, data: bytes | None, waited_s: float
    ) -> EngineResult:
        """As `EngineClient.submit`, but for what is there already."""
        if not self.was_moved:
            return await engine.submit(request, on_update, data)
        states = [state for state, _ in self.states.values()]
        message = Resume(request, tuple(states), tuple(self.images), self.model_version, waited_s)
        frame = b"".join([*(each for _, each in self.states.values()), data or b""])
        result = await engine.submit(request, on_update, frame or None, message, self.images)
        timings, predicted_s = result.timings, self.predicted_s
        if isinstance(timings, Timings):
            timings = _sum(timings, self.timings)
        return replace(result, timings=timings, predicted_s=result.predicted_s if predicted_s is None else predicted_s)

    def after(self, moved: AttemptMovedError, request: AnyRequest) -> "CarriedImages":
        """Return what the request has after one more engine has handed it over. What cannot be is left out."""
        message, frame = moved.message, moved.data or memoryview(b"")
        states = {index: each for index, each in self.states.items() if index not in moved.images}
        if sum(state.num_bytes for state in message.images) == len(frame):
            for state in message.images:
                states[state.index] = state, frame[: state.num_bytes]
                frame = frame[state.num_bytes :]
            declarations.IMAGES_MOVED.labels(request.model, "moved").inc(len(message.images))
        timings = _sum(message.timings, self.timings) if isinstance(message.timings, Timings) else self.timings
        predicted_s = moved.predicted_s if self.predicted_s is None else self.predicted_s
        version = message.model_version or self.model_version
        return CarriedImages(True, moved.images, states, version, timings, predicted_s)

    def after_refusal(self, refused: StateRefusedError, request: AnyRequest) -> "CarriedImages":
        """Return what the request has when an engine cannot go on with its states: it begins anew.

        Raises:
            GenerationFailed: it has none.

        """
        extra = fields(event="move_refused", request_id=request.request_id, key=request.client or None)
        _log.warning("%s begins anew: %s", request.request_id, refused, extra=extra)
        if not self.states:
            raise GenerationFailed("the engine's reply is invalid; the log has the details.")
        declarations.IMAGES_MOVED.labels(request.model, "refused").inc(len(self.states))
        return self.without_states()

    def without_states(self) -> "CarriedImages":
        """Return only the images that are done."""
        return replace(self, states={})


def _sum(timings: Timings, before: Timings | None) -> Timings:
    if before is None:
        return timings
    added = msgspec.structs.asdict(before)
    return Timings(**{name: seconds + added[name] for name, seconds in msgspec.structs.asdict(timings).items()})
