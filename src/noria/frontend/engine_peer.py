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

from noria import messages
from noria.channel import EngineConnection
from noria.errors import GenerationFailed, NoriaError, all_codes
from noria.frontend.losses import Obituary
from noria.messages import (
    Cancel,
    EngineState,
    Failed,
    Finished,
    Follow,
    FromEngine,
    Heard,
    Hello,
    ImageDone,
    Load,
    Pong,
    Preview,
    Submit,
    Timings,
    WheelView,
)
from noria.observe.lines import fields
from noria.observe.requests import current_note
from noria.request import ImageRequest, flight_id, request_id_of

log = logging.getLogger("noria.frontend")

_LAST_WORDS_S = 0.5  # for an engine to tell how far it was with a request that is taken out; most turns are shorter


@dataclass(frozen=True)
class DrawnImage:
    """One image as the engine sent it: `rgb` is height × width × 3 bytes."""

    seed: int
    width_px: int
    height_px: int
    rgb: memoryview


@dataclass(frozen=True)
class Result:
    """All images of a request, in order of their index."""

    images: tuple[DrawnImage, ...]
    timings: Timings
    num_steps_run: int
    mean_batch: float  # images that shared its steps, itself included
    predicted_s: float  # until its finish, as the engine said when it accepted the request


@dataclass(frozen=True)
class Progress:
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


Update = Progress | PreviewImage
Watch = Callable[[Update], None]
"""Is told of a request's way, in the event loop, and must not wait."""


@dataclass(frozen=True)
class EngineView:
    """One engine as /readyz tells of it; "unknown" is not connected, or not heard of yet."""

    state: Literal["unknown", "loading", "ready"]
    device: str | None
    incarnation: str | None


class EngineGone(Exception):
    """The engine ended with `flight_id` on board. `obituary` is done when its next life has told how; None: it never got there."""

    def __init__(self, flight_id: str, obituary: "asyncio.Future[Obituary] | None") -> None:
        super().__init__(flight_id)
        self.flight_id = flight_id
        self.obituary = obituary


@dataclass
class _Flight:
    """One request at one engine, until its `landed` is done."""

    num_images: int
    landed: asyncio.Future[Result]
    watch: Watch | None
    images: dict[int, DrawnImage] = field(default_factory=dict)
    predicted_s: float | None = None
    failed: Failed | None = None  # how the engine said that it ended

    def describe(self) -> None:
        """Say in the request's line how far it came, if it failed and the engine has told."""
        if self.failed is None or self.failed.timings is None:
            return
        current_note().add(
            **msgspec.structs.asdict(self.failed.timings),
            predicted_s=self.predicted_s,
            mean_batch=self.failed.mean_batch,
            steps_run=self.failed.num_steps_run,
        )


class EnginePeer:
    """One engine, seen through its connection."""

    def __init__(self, connection: EngineConnection, name: str) -> None:
        """`name` is ours."""
        self._name = name
        self.connection = connection
        self.load: Load | None = None
        self._connected = False
        self._told: EngineState | None = None  # since the connection stands
        self._lost_incarnation: str | None = None
        self._obituary: asyncio.Future[Obituary] | None = None  # of the life that was lost, until the next one has told
        self._flights: dict[str, _Flight] = {}

    @property
    def ready(self) -> bool:
        """Whether it draws."""
        return self._told is not None and self._told.state == "ready"

    @property
    def num_images_in_flight(self) -> int:
        """Images that it has been asked for and has not finished."""
        return sum(flight.num_images for flight in self._flights.values())

    def view(self) -> EngineView:
        """As it is shown."""
        if self._told is None:
            return EngineView("unknown", None, None)
        told = self._told
        device = None if told.device == "auto" else told.device  # which one that is, it knows when it has loaded
        return EngineView(told.state, device, told.incarnation)

    async def draw(self, request: ImageRequest, watch: Watch | None) -> Result:
        """Have it drawn here. A cancelled call takes it out of the engine. Raises EngineGone, or what the engine answered."""
        # Two clients may send the same X-Request-Id, and a second try may meet the first: the engine knows each flight apart.
        name = flight_id(request.request_id, secrets.token_hex(4))
        flight = _Flight(request.num_images, asyncio.get_running_loop().create_future(), watch)
        self._flights[name] = flight
        try:
            await self.connection.send(Submit(msgspec.structs.replace(request, request_id=name)))
            await asyncio.wait([flight.landed])  # unlike awaiting it, leaves it be when this call is cancelled
            return flight.landed.result()
        except zmq.Again as error:  # it ended, and `Lost` is still on its way to us
            flight.landed.cancel()
            self.lose()
            raise EngineGone(name, None) from error
        except asyncio.CancelledError:
            await self._take_out(name, flight)
            raise
        finally:
            self._flights.pop(name, None)
            flight.describe()

    async def _take_out(self, name: str, flight: _Flight) -> None:
        """Have the engine forget it, and hear how far it came."""
        flight.watch = None
        with contextlib.suppress(zmq.ZMQError):
            await self.connection.send(Cancel(name))
            await asyncio.wait([flight.landed], timeout=_LAST_WORDS_S)
        if not flight.landed.cancel():
            flight.landed.exception()  # nobody else will ask for it, which asyncio would complain of

    async def greet(self) -> None:
        """The connection stands."""
        self._connected = True
        with contextlib.suppress(zmq.Again):  # it has ended again: another `Connected` follows
            await self.connection.send(Hello(self._name))

    async def thank(self) -> None:
        """It has told its load, and may go on."""
        with contextlib.suppress(zmq.Again):  # it has ended
            await self.connection.send(Heard())

    async def follow(self, message: Follow) -> None:
        """Ask for a view of its wheel, if it is ready."""
        if self.ready:
            with contextlib.suppress(zmq.Again):  # it has ended
                await self.connection.send(message)

    def lose(self) -> None:
        """The connection is gone, and with it every flight."""
        if self._obituary is None and self._told is not None:
            self._obituary = asyncio.get_running_loop().create_future()
            self._lost_incarnation = self._told.incarnation
        self._connected = False
        self._told = self.load = None
        for name, flight in self._flights.items():
            if not flight.landed.done():
                flight.landed.set_exception(EngineGone(name, self._obituary))

    def receive(self, message: FromEngine, payload: memoryview | None) -> bool:
        """Take note of what it says; False of a dead engine's last words, overtaken by the news of its death: they are not heard."""
        if not self._connected:
            return False
        match message:
            case EngineState():
                self._tell(message)
            case Load():
                self.load = message
            case Pong() | WheelView():  # asked for by the supervisor only; the link hands on
                pass
            case _:
                self._land(message, payload)
        return True

    def _land(
        self,
        message: messages.Progress | Preview | ImageDone | Finished | Failed,
        payload: memoryview | None,
    ) -> None:
        flight = self._flights.get(message.request_id)
        if flight is None or flight.landed.done():  # its caller has left
            return
        try:
            _take(flight, message, payload)
        except Exception:  # an engine's nonsense: it costs this request, not the link
            said = fields(event="nonsense", request_id=request_id_of(message.request_id))
            log.exception("%s: its engine's answer makes no sense", message.request_id, extra=said)
            flight.landed.set_exception(
                GenerationFailed("the engine's answer makes no sense; the log has the details.")
            )

    def _tell(self, state: EngineState) -> None:
        self._told = state
        if self._obituary is not None:
            lives_on = state.incarnation == self._lost_incarnation  # only the connection was lost: nobody's doing
            end = "killed" if lives_on else state.previous_end
            self._obituary.set_result(Obituary(end, frozenset() if lives_on else frozenset(state.aboard)))
            self._obituary = None


def _take(
    flight: _Flight,
    message: messages.Progress | Preview | ImageDone | Finished | Failed,
    payload: memoryview | None,
) -> None:
    match message:
        case messages.Progress(queue_position=position, call=call, num_calls=num_calls, finish_in_s=finish_in_s):
            if flight.predicted_s is None:
                flight.predicted_s = finish_in_s
            if flight.watch is not None:
                flight.watch(Progress(position, call, num_calls, finish_in_s))
        case Preview(index=index, call=call, width_px=width_px, height_px=height_px):
            assert payload is not None, "a preview travels with its pixels"
            if flight.watch is not None:
                flight.watch(PreviewImage(index, call, width_px, height_px, bytes(payload)))
        case ImageDone(index=index, seed=seed, width_px=width_px, height_px=height_px):
            assert payload is not None, "an image travels with its pixels"
            flight.images[index] = DrawnImage(seed, width_px, height_px, payload)
        case Finished(timings=timings, num_steps_run=num_steps_run, mean_batch=mean_batch):
            images = tuple(flight.images[index] for index in range(flight.num_images))
            assert flight.predicted_s is not None, "a request is accepted before it is finished"
            flight.landed.set_result(Result(images, timings, num_steps_run, mean_batch, flight.predicted_s))
        case Failed(code=code, message=text, field=field_name, retry_after_s=retry_after_s):
            flight.failed = message
            kind: type[NoriaError] = all_codes().get(code, GenerationFailed)
            flight.landed.set_exception(kind(text, field=field_name, retry_after_s=retry_after_s))
