"""Images and states of a request from engines that handed it over; the front end keeps them until the request ends.

So engines never meet, and an engine that is lost after a move costs only the steps since then.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from noria.errors import GenerationFailed
from noria.frontend.engines.attempt import AttemptMovedError, MoveReason, StateRefusedError
from noria.frontend.engines.client import EngineClient
from noria.frontend.engines.results import EngineResult, OnUpdate, RawImage
from noria.observe.logs.log_record import fields
from noria.observe.logs.request_log import RequestLogRecord
from noria.observe.metrics import declarations
from noria.protocol.messages import HandedOver, ImageState, Resume, Timings
from noria.protocol.request import AnyRequest

_log = logging.getLogger("noria.frontend")

MAX_STATE_BYTES = 2**28
"""Of the states of all requests of a front end: 200 to 1,000 images of 1024 × 1024, a quarter with 16 channels."""


@dataclass(eq=False)
class CarriedImages:
    """The images of a request that are done, and how far others are."""

    was_moved: bool = False
    reason: MoveReason = "leave"  # reason of the last move
    images: Mapping[int, RawImage] = field(default_factory=dict)  # by index
    states: dict[int, tuple[ImageState, memoryview]] = field(default_factory=dict)  # by index
    model_version: str = ""  # version of the model that computed `states`
    timings: Timings | None = None  # timings of all engines before, added up
    predicted_s: float | None = None  # by the first engine

    async def submit(
        self,
        engine: EngineClient,
        request: AnyRequest,
        on_update: OnUpdate | None,
        data: bytes | None,
        waited_s: float,
        log_record: RequestLogRecord | None,
    ) -> EngineResult:
        """Submit like `EngineClient.submit`, but go on from what is there already."""
        if not self.was_moved:
            return await engine.submit(request, on_update, data, log_record=log_record)
        states = [state for state, _ in self.states.values()]
        request = msgspec.structs.replace(request, was_moved=True)
        message = Resume(request, tuple(states), tuple(self.images), self.model_version, waited_s)
        frame = b"".join([*(each for _, each in self.states.values()), data or b""])
        result = await engine.submit(request, on_update, frame or None, message, self.images, log_record)
        timings, predicted_s = result.timings, self.predicted_s
        if isinstance(timings, Timings):
            timings = _sum(timings, self.timings)
        predicted_s = result.predicted_s if predicted_s is None else predicted_s
        return msgspec.structs.replace(result, timings=timings, predicted_s=predicted_s)

    @property
    def num_bytes(self) -> int:
        """The bytes of its states."""
        return sum(len(data) for _, data in self.states.values())

    def update(self, moved: AttemptMovedError, request: AnyRequest, room_bytes: int) -> None:
        """Take what one more engine has handed over.

        Images whose states are not as long as they say, or longer than `room_bytes`, begin where they began there.
        """
        message, frame = moved.message, moved.data or memoryview(b"")
        self.was_moved, self.images, self.reason = True, moved.images, moved.reason
        self.states = {index: each for index, each in self.states.items() if index not in moved.images}
        begun = {*self.images, *self.states, *(state.index for state in message.images)}
        self._count("waiting", len(set(range(request.payload.num_results)) - begun), request)
        num_bytes = sum(state.num_bytes for state in message.images)
        if num_bytes != len(frame):
            self._drop(message, request, f"{len(frame)} bytes came, and not {num_bytes}")
        elif num_bytes > room_bytes:
            self._drop(message, request, f"they have {num_bytes} bytes, and the front end has room for {room_bytes}")
        else:
            for state in message.images:
                self.states[state.index] = state, frame[: state.num_bytes]
                frame = frame[state.num_bytes :]
            self._count("moved", len(message.images), request)
        if isinstance(message.timings, Timings):
            self.timings = _sum(message.timings, self.timings)
        self.predicted_s = moved.predicted_s if self.predicted_s is None else self.predicted_s
        self.model_version = message.model_version or self.model_version

    def begin_anew(self, refused: StateRefusedError, request: AnyRequest) -> None:
        """Drop the states, since an engine cannot go on with them. Raises GenerationFailed: there are none."""
        extra = fields(event="move_refused", request_id=request.request_id, key=request.client or None)
        _log.warning("%s begins anew: %s", request.request_id, refused, extra=extra)
        if not self.states:
            raise GenerationFailed("the engine's reply is invalid; the log has the details.")
        self._count("refused", len(self.states), request)
        self.drop_states()

    def drop_states(self) -> None:
        """Keep only the images that are done."""
        self.states = {}

    def _drop(self, message: HandedOver, request: AnyRequest, why: str) -> None:
        """Log and count that images begin anew."""
        num_images = len(message.images)
        extra = fields(
            event="state_dropped", request_id=request.request_id, key=request.client or None, num_images=num_images
        )
        _log.warning("%s: the states of %d images are dropped: %s", request.request_id, num_images, why, extra=extra)
        self._count("dropped", num_images, request)

    def _count(self, outcome: str, num_images: int, request: AnyRequest) -> None:
        declarations.IMAGES_MOVED.labels(request.model, outcome, self.reason).inc(num_images)


def _sum(timings: Timings, before: Timings | None) -> Timings:
    if before is None:
        return timings
    added = msgspec.structs.asdict(before)
    return Timings(**{name: seconds + added[name] for name, seconds in msgspec.structs.asdict(timings).items()})
