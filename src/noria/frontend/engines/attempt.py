"""A request at an engine: what the engine has answered so far, and how it can end without a result."""

import asyncio
from collections.abc import Mapping
from typing import Literal, get_args

import msgspec

from noria.errors import GenerationFailed, NoriaError, all_codes
from noria.frontend.engines.crash_attribution import ExitReport
from noria.frontend.engines.results import EngineResult, OnUpdate, PreviewImage, ProgressUpdate, RawImage
from noria.observe.logs.request_log import RequestLogRecord
from noria.observe.metrics import declarations
from noria.protocol import messages
from noria.protocol.messages import AboutAttempt, Failed, Finished, HandedOver, ImageDone, Preview, StateRefused
from noria.protocol.request import AnyRequest
from noria.protocol.text import TextPayload

_MIN_STAY_S = 10.0  # minimum stay of a request that has moved, before it moves to a less busy engine


class AttemptLostError(Exception):
    """The engine ended with an attempt in flight.

    `exit_report` is done when the engine's next process has reported how it ended; None if the attempt was never sent.
    `is_remote`: it may be that the engine's machine was lost, which reports nothing.
    """

    def __init__(
        self, attempt_id: str, exit_report: "asyncio.Future[ExitReport] | None", *, is_remote: bool = False
    ) -> None:
        super().__init__(attempt_id)
        self.attempt_id = attempt_id
        self.exit_report = exit_report
        self.is_remote = is_remote


MoveReason = Literal["leave", "backlog"]
"""Why an engine hands a request over: it takes no new ones for the model, or another engine has less to do."""


class AttemptMovedError(Exception):
    """The engine has handed the attempt over. `images` are those that are done, `data` is the frame beside `message`.

    `predicted_s` is when it would have been finished there.
    """

    def __init__(
        self,
        message: HandedOver,
        data: memoryview | None,
        images: Mapping[int, RawImage],
        predicted_s: float | None,
        reason: MoveReason,
    ) -> None:
        super().__init__(message.attempt_id)
        self.message, self.data, self.images, self.predicted_s = message, data, images, predicted_s
        self.reason: MoveReason = reason


class AttemptNotHeldError(Exception):
    """The engine has not accepted the attempt, since its checkpoint has just left."""


class StateRefusedError(Exception):
    """The engine cannot go on from what another one has handed over."""


class Attempt(msgspec.Struct, eq=False):
    """A request at an engine, until its `outcome` is done."""

    request: AnyRequest
    outcome: asyncio.Future[EngineResult]
    on_update: OnUpdate | None
    images: dict[int, RawImage] = msgspec.field(default_factory=dict)
    predicted_s: float | None = None
    failure: Failed | None = None  # the engine's message, if it failed
    began: float = 0.0  # seconds of the event loop's clock
    released_for: MoveReason | None = None  # why the engine was asked to hand it over

    def is_movable(self, now: float) -> bool:
        """Whether the engine may hand it over to a less busy one."""
        request = self.request
        return (
            not isinstance(request.payload, TextPayload)
            and not request.exclusive
            and request.deadline_s is None  # the engine has promised it
            and (not request.was_moved or now - self.began >= _MIN_STAY_S)
        )

    def add_to(self, log_record: RequestLogRecord) -> None:
        """Add the timings of a failed attempt, if the engine sent them."""
        if self.failure is None or self.failure.timings is None:
            return
        log_record.add(
            **msgspec.structs.asdict(self.failure.timings),
            predicted_s=self.predicted_s,
            mean_batch=self.failure.mean_batch,
            steps_run=self.failure.num_steps_run,
        )

    def receive(self, message: AboutAttempt, data: memoryview | None) -> None:
        """Take a message of the engine. May raise anything if it is invalid."""
        match message:
            case messages.Progress(queue_position=position, call=call, num_calls=num_calls, finish_in_s=finish_in_s):
                if self.predicted_s is None:
                    self.predicted_s = finish_in_s
                if self.on_update is not None:
                    self.on_update(ProgressUpdate(position, call, num_calls, finish_in_s))
            case Preview(index=index, call=call, width_px=width_px, height_px=height_px):
                assert data is not None, "a preview comes with its pixels"
                if self.on_update is not None:
                    self.on_update(PreviewImage(index, call, width_px, height_px, bytes(data)))
            case ImageDone(index=index, is_refused=is_refused):
                assert (data is None) == is_refused, "an image comes with its pixels, unless it is refused"
                self.images[index] = raw_image(message, memoryview(b"") if data is None else data)
            case Finished(timings=timings, num_steps_run=num_steps_run, mean_batch=mean_batch, result=final):
                images: tuple[RawImage, ...] = ()
                if final is None:
                    images = tuple([self.images[index] for index in range(self.request.payload.num_results)])
                predicted_s = self.predicted_s if message.predicted_s is None else message.predicted_s
                assert predicted_s is not None, "a request is accepted before it is finished"
                assert (final is None) == (data is None), "results come with their description"
                result = EngineResult(images, timings, num_steps_run, mean_batch, predicted_s, final, data)
                self.outcome.set_result(result)
            case Failed(code=code, message=text, field=field_name, retry_after_s=retry_after_s):
                self.failure = message
                kind: type[NoriaError] = all_codes().get(code, GenerationFailed)
                self.outcome.set_exception(kind(text, field=field_name, retry_after_s=retry_after_s))
            case HandedOver():
                reason = self.released_for or "leave"
                self.outcome.set_exception(AttemptMovedError(message, data, self.images, self.predicted_s, reason))
            case StateRefused() | messages.NotHeld():
                refused = isinstance(message, StateRefused) and StateRefusedError(message.message)
                self.outcome.set_exception(refused or AttemptNotHeldError(message.attempt_id))


def raw_image(done: ImageDone, rgb: memoryview) -> RawImage:
    """Return the image of an engine's message and its pixels."""
    return RawImage(
        done.seed, done.width_px, done.height_px, rgb, done.num_truncated_tokens, done.safety_score, done.is_refused
    )


def count_moves_from_zero(model: str) -> None:
    """Have the metric of a model's moved images before the first of them, which its rate would not see otherwise."""
    for reason in get_args(MoveReason):
        declarations.IMAGES_MOVED.labels(model, "moved", reason).inc(0)
