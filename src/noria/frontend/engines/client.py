"""One engine as a front end sees it: its state, the requests in flight at it, and what its end means for them.

What it says comes in by `receive`; what becomes of a request that it loses is not decided here.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import msgspec
import zmq

from noria.errors import GenerationFailed, NoriaError, all_codes
from noria.frontend.engines.crash_attribution import ExitReport
from noria.observe.logs.log_record import fields
from noria.observe.logs.request_log import current_log_record
from noria.protocol import messages
from noria.protocol.messages import (
    Cancel,
    EngineLoad,
    EngineState,
    EngineView,
    Failed,
    Finished,
    FromEngine,
    Hello,
    ImageDone,
    LoadAck,
    Pong,
    Preview,
    Submit,
    Timings,
    ViewRequest,
)
from noria.protocol.request import ImageRequest, attempt_id, request_id_of
from noria.protocol.transport import EngineConnection

log = logging.getLogger("noria.frontend")

_CANCEL_REPLY_TIMEOUT_S = (
    0.5  # for an engine to tell how far it was with a request that is taken out; most turns are shorter
)


@dataclass(frozen=True)
class RawImage:
    """One image as the engine sent it: `rgb` is height × width × 3 bytes."""

    seed: int
    width_px: int
    height_px: int
    rgb: memoryview


@dataclass(frozen=True)
class EngineResult:
    """All images of a request, in order of their index."""

    images: tuple[RawImage, ...]
    timings: Timings
    num_steps_run: int
    mean_batch: float  # images that shared its steps, itself included
    predicted_s: float  # until its finish, as the engine said when it accepted the request


@dataclass(frozen=True)
class ProgressUpdate:
    """How far a request is; of several images, the one furthest behind."""

    queue_position: int | None  # images that will board before its last one; None: all of them have boarded
    step: int
    num_steps: int
    finish_in_s: float | None  # predicted; None while it waits for an engine


@dataclass(frozen=True)
class PreviewImage:
    """What image `index` is going to be, as seen at `step`: height × width × 3 bytes of RGB, a few pixels wide."""

    index: int
    step: int
    width_px: int
    height_px: int
    rgb: bytes


Update = ProgressUpdate | PreviewImage
OnUpdate = Callable[[Update], None]
"""Is told of a request's way, in the event loop, and must not wait."""


@dataclass(frozen=True)
class EngineStatus:
    """One engine as /readyz tells of it; "unknown" is not connected, or not heard of yet."""

    state: Literal["unknown", "loading", "ready"]
    device: str | None
    incarnation: str | None


class AttemptLostError(Exception):
    """The engine ended with `flight_id` on board. `obituary` is done when its next life has told how; None: it never got there."""

    def __init__(self, attempt_id: str, exit_report: "asyncio.Future[ExitReport] | None") -> None:
        super().__init__(attempt_id)
        self.attempt_id = attempt_id
        self.exit_report = exit_report


@dataclass
class _Attempt:
    """One request at one engine, until its `landed` is done."""

    num_images: int
    outcome: asyncio.Future[EngineResult]
    on_update: OnUpdate | None
    images: dict[int, RawImage] = field(default_factory=dict)
    predicted_s: float | None = None
    failure: Failed | None = None  # how the engine said that it ended

    def add_to_request_log(self) -> None:
        """Say in the request's line how far it came, if it failed and the engine has told."""
        if self.failure is None or self.failure.timings is None:
            return
        current_log_record().add(
            **msgspec.structs.asdict(self.failure.timings),
            predicted_s=self.predicted_s,
            mean_batch=self.failure.mean_batch,
            steps_run=self.failure.num_steps_run,
        )


class EngineClient:
    """One engine, seen through its connection."""

    def __init__(self, connection: EngineConnection, name: str) -> None:
        """`name` is ours."""
        self._name = name
        self.connection = connection
        self.load: EngineLoad | None = None
        self._connected = False
        self._last_state: EngineState | None = None  # since the connection stands
        self._lost_incarnation: str | None = None
        self._exit_report: asyncio.Future[ExitReport] | None = (
            None  # of the life that was lost, until the next one has told
        )
        self._attempts: dict[str, _Attempt] = {}

    @property
    def ready(self) -> bool:
        """Whether it draws."""
        return self._last_state is not None and self._last_state.state == "ready"

    @property
    def num_images_in_flight(self) -> int:
        """Images that it has been asked for and has not finished."""
        return sum(attempt.num_images for attempt in self._attempts.values())

    def status(self) -> EngineStatus:
        """As it is shown."""
        if self._last_state is None:
            return EngineStatus("unknown", None, None)
        state = self._last_state
        device = None if state.device == "auto" else state.device  # which one that is, it knows when it has loaded
        return EngineStatus(state.state, device, state.incarnation)

    async def submit(self, request: ImageRequest, on_update: OnUpdate | None) -> EngineResult:
        """Have it drawn here. A cancelled call takes it out of the engine. Raises EngineGone, or what the engine answered."""
        # Two clients may send the same X-Request-Id, and a second try may meet the first: the engine knows each flight apart.
        name = attempt_id(request.request_id, secrets.token_hex(4))
        attempt = _Attempt(request.num_images, asyncio.get_running_loop().create_future(), on_update)
        self._attempts[name] = attempt
        try:
            await self.connection.send(Submit(msgspec.structs.replace(request, request_id=name)))
            await asyncio.wait([attempt.outcome])  # unlike awaiting it, leaves it be when this call is cancelled
            return attempt.outcome.result()
        except zmq.Again as error:  # it ended, and `Lost` is still on its way to us
            attempt.outcome.cancel()
            self.handle_disconnect()
            raise AttemptLostError(name, None) from error
        except asyncio.CancelledError:
            await self._cancel(name, attempt)
            raise
        finally:
            self._attempts.pop(name, None)
            attempt.add_to_request_log()

    async def _cancel(self, name: str, attempt: _Attempt) -> None:
        """Have the engine forget it, and hear how far it came."""
        attempt.on_update = None
        with contextlib.suppress(zmq.ZMQError):
            await self.connection.send(Cancel(name))
            await asyncio.wait([attempt.outcome], timeout=_CANCEL_REPLY_TIMEOUT_S)
        if not attempt.outcome.cancel():
            attempt.outcome.exception()  # nobody else will ask for it, which asyncio would complain of

    async def send_hello(self) -> None:
        """The connection stands."""
        self._connected = True
        with contextlib.suppress(zmq.Again):  # it has ended again: another `Connected` follows
            await self.connection.send(Hello(self._name))

    async def ack_load(self) -> None:
        """It has told its load, and may go on."""
        with contextlib.suppress(zmq.Again):  # it has ended
            await self.connection.send(LoadAck())

    async def request_view(self, message: ViewRequest) -> None:
        """Ask for a view of its wheel, if it is ready."""
        if self.ready:
            with contextlib.suppress(zmq.Again):  # it has ended
                await self.connection.send(message)

    def handle_disconnect(self) -> None:
        """The connection is gone, and with it every flight."""
        if self._exit_report is None and self._last_state is not None:
            self._exit_report = asyncio.get_running_loop().create_future()
            self._lost_incarnation = self._last_state.incarnation
        self._connected = False
        self._last_state = self.load = None
        for name, attempt in self._attempts.items():
            if not attempt.outcome.done():
                attempt.outcome.set_exception(AttemptLostError(name, self._exit_report))

    def receive(self, message: FromEngine, payload: memoryview | None) -> bool:
        """Take note of what it says; False of a dead engine's last words, overtaken by the news of its death: they are not heard."""
        if not self._connected:
            return False
        match message:
            case EngineState():
                self._update_state(message)
            case EngineLoad():
                self.load = message
            case Pong() | EngineView():  # asked for by the supervisor only; the link hands on
                pass
            case _:
                self._dispatch(message, payload)
        return True

    def _dispatch(
        self,
        message: messages.Progress | Preview | ImageDone | Finished | Failed,
        payload: memoryview | None,
    ) -> None:
        attempt = self._attempts.get(message.request_id)
        if attempt is None or attempt.outcome.done():  # its caller has left
            return
        try:
            _apply_message(attempt, message, payload)
        except Exception:  # an engine's nonsense: it costs this request, not the link
            extra = fields(event="nonsense", request_id=request_id_of(message.request_id))
            log.exception("%s: its engine's answer makes no sense", message.request_id, extra=extra)
            attempt.outcome.set_exception(
                GenerationFailed("the engine's answer makes no sense; the log has the details.")
            )

    def _update_state(self, state: EngineState) -> None:
        self._last_state = state
        if self._exit_report is not None:
            is_same_incarnation = (
                state.incarnation == self._lost_incarnation
            )  # only the connection was lost: nobody's doing
            exit_cause = "killed" if is_same_incarnation else state.previous_exit
            self._exit_report.set_result(
                ExitReport(exit_cause, frozenset() if is_same_incarnation else frozenset(state.in_flight))
            )
            self._exit_report = None


def _apply_message(
    attempt: _Attempt,
    message: messages.Progress | Preview | ImageDone | Finished | Failed,
    payload: memoryview | None,
) -> None:
    match message:
        case messages.Progress(queue_position=position, call=call, num_calls=num_calls, finish_in_s=finish_in_s):
            if attempt.predicted_s is None:
                attempt.predicted_s = finish_in_s
            if attempt.on_update is not None:
                attempt.on_update(ProgressUpdate(position, call, num_calls, finish_in_s))
        case Preview(index=index, call=call, width_px=width_px, height_px=height_px):
            assert payload is not None, "a preview travels with its pixels"
            if attempt.on_update is not None:
                attempt.on_update(PreviewImage(index, call, width_px, height_px, bytes(payload)))
        case ImageDone(index=index, seed=seed, width_px=width_px, height_px=height_px):
            assert payload is not None, "an image travels with its pixels"
            attempt.images[index] = RawImage(seed, width_px, height_px, payload)
        case Finished(timings=timings, num_steps_run=num_steps_run, mean_batch=mean_batch):
            images = tuple(attempt.images[index] for index in range(attempt.num_images))
            assert attempt.predicted_s is not None, "a request is accepted before it is finished"
            attempt.outcome.set_result(EngineResult(images, timings, num_steps_run, mean_batch, attempt.predicted_s))
        case Failed(code=code, message=text, field=field_name, retry_after_s=retry_after_s):
            attempt.failure = message
            kind: type[NoriaError] = all_codes().get(code, GenerationFailed)
            attempt.outcome.set_exception(kind(text, field=field_name, retry_after_s=retry_after_s))
