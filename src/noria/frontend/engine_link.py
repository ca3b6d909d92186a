"""The front end's end of the channel to the engines: which are ready, which takes a request, and what happens when one dies.

A request flies to the ready engine with the fewest images in flight. If that process ends, the request is sent once more, with
the same seed and so for the same image, to another engine or to the same one when it is back; a second loss is the client's to
retry. Retries take turns, one at a time: a request that ends every engine it meets ends the second one without its former company,
which survives. A caller that is cancelled takes its request out of the engine, and an engine's nonsense costs the request it is
about. This module knows no HTTP and never looks into pixels.
"""

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Self

import msgspec
import zmq

from noria import messages
from noria.channel import Connected, EngineConnection, Lost
from noria.errors import DeadlineExceeded, EngineLost, EngineUnavailable, GenerationFailed, NoriaError, all_codes
from noria.messages import (
    Cancel,
    EngineState,
    Failed,
    Finished,
    FromEngine,
    Hello,
    ImageDone,
    Load,
    Pong,
    Preview,
    Submit,
    Timings,
)
from noria.request import ImageRequest
from noria.spec import ModelSpec

_RETRY_AFTER_S = 5.0  # a small model is back within seconds, a large one within a minute: a polite first guess
_GRACE_S = 5.0  # the engine answers a missed deadline itself; this is for one that has stopped answering at all

log = logging.getLogger("noria.frontend")


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
class EngineLoad:
    """How busy the engines are, all together; `drain_s` is that of the one that takes the next request."""

    drain_s: float
    num_seated: int
    num_waiting: int
    num_slots: int


@dataclass(frozen=True)
class EngineView:
    """One engine as /readyz tells of it; "unknown" is not connected, or not heard of yet."""

    state: Literal["unknown", "loading", "ready"]
    device: str | None
    incarnation: str | None


class EngineLink:
    """Connections to the engines at `addresses`, for as long as it is entered as an asynchronous context."""

    def __init__(self, addresses: Sequence[str], restart_wait_s: float = 60.0) -> None:
        self._addresses = tuple(addresses)
        self._restart_wait_s = restart_wait_s
        self._engines: list[_Engine] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Condition()
        self._retrying = asyncio.Lock()
        self._stopping = False
        self._timers: set[asyncio.Timeout] = set()  # of the calls of `submit` that run
        self._models: dict[str, ModelSpec] = {}

    async def __aenter__(self) -> Self:
        self._engines = [_Engine(EngineConnection(address)) for address in self._addresses]
        self._tasks = [asyncio.create_task(self._follow(engine)) for engine in self._engines]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for engine in self._engines:
            engine.connection.close()

    @property
    def ready(self) -> bool:
        """Whether a request submitted now would be taken."""
        return any(engine.ready for engine in self._engines)

    @property
    def models(self) -> Mapping[str, ModelSpec]:
        """The models served, by name, as last told by a ready engine, the default one first; empty until one was ready."""
        return self._models

    @property
    def load(self) -> EngineLoad:
        """How busy the engines were when they last told."""
        loads = [engine.load for engine in self._engines if engine.ready and engine.load is not None]
        return EngineLoad(
            min((load.drain_s for load in loads), default=0.0),
            sum(load.num_seated for load in loads),
            sum(load.num_waiting for load in loads),
            sum(load.num_slots for load in loads),
        )

    def costs(self, model: str) -> list[messages.ShapeCosts]:
        """What the engines have measured of a model, in the order of the engines."""
        told = [engine.load.costs for engine in self._engines if engine.load is not None]
        return [costs for of_engine in told for costs in of_engine if costs.model == model]

    @property
    def engines(self) -> list[EngineView]:
        """What is known of each engine, in the order of their addresses."""
        return [engine.view() for engine in self._engines]

    def unavailable(self) -> EngineUnavailable:
        """The refusal of a request while no engine is ready."""
        states = ", ".join(f"engine {number} is {view.state}" for number, view in enumerate(self.engines))
        return EngineUnavailable(
            f"no engine is ready ({states}); try again in a few seconds.", retry_after_s=_RETRY_AFTER_S
        )

    async def submit(self, request: ImageRequest, watch: Watch | None = None) -> Result:
        """Have `request` drawn; `watch` hears of its way. A cancelled call takes it out of the engine at its next step.

        Raises:
            EngineUnavailable: at once, when no engine is ready; or at `stop`.
            EngineLost: the engine ended with the request in flight, twice, or did not come back in time.
            DeadlineExceeded: `timeout_s` is over.
            NoriaError: whatever the engine answered.

        """
        if self._stopping:
            raise _stopped()
        deadline = asyncio.get_running_loop().time() + request.timeout_s
        engine = self._least_loaded()
        if engine is None:
            raise self.unavailable()
        timer = asyncio.timeout_at(deadline + _GRACE_S)
        self._timers.add(timer)
        try:
            async with timer:
                try:
                    return await engine.draw(request, watch)
                except _EngineGone:
                    log.warning("%s: its engine ended; sending it once more", request.request_id)
                return await self._draw_again(request, deadline, watch)
        except TimeoutError as error:
            if self._stopping:
                raise _stopped() from error
            raise DeadlineExceeded(f"not done after {request.timeout_s:g} s.") from error
        finally:
            self._timers.discard(timer)

    def stop(self) -> None:
        """Fail every request in flight, and any to come, with EngineUnavailable: the end of a drain."""
        self._stopping = True
        for timer in self._timers:
            if not timer.expired():
                timer.reschedule(0.0)

    async def _draw_again(self, request: ImageRequest, deadline: float, watch: Watch | None) -> Result:
        lost = EngineLost(
            "the engine ended while it drew this request, also at the second try.", retry_after_s=_RETRY_AFTER_S
        )
        while True:
            try:
                async with asyncio.timeout(self._restart_wait_s), self._changed:
                    await self._changed.wait_for(lambda: self.ready)
            except TimeoutError as error:
                raise lost from error
            async with self._retrying:  # the caller's deadline bounds the wait for a turn, too
                engine = self._least_loaded()
                if engine is None:  # the retry before this one has ended it
                    continue
                left_s = max(deadline - asyncio.get_running_loop().time(), 0.0)
                try:
                    return await engine.draw(msgspec.structs.replace(request, timeout_s=left_s), watch)
                except _EngineGone as error:
                    raise lost from error

    def _least_loaded(self) -> "_Engine | None":
        ready = [engine for engine in self._engines if engine.ready]
        return min(ready, key=lambda engine: engine.num_images_in_flight, default=None)

    async def _follow(self, engine: "_Engine") -> None:
        try:
            async for event in engine.connection.events():
                await self._heard(engine, event)
        except Exception:  # a bug of ours or the engine's; /readyz tells
            log.exception("the link to an engine broke")
        finally:
            engine.lose()

    async def _heard(self, engine: "_Engine", event: Connected | Lost | tuple[FromEngine, memoryview | None]) -> None:
        match event:
            case Connected():
                await engine.greet()
            case Lost():
                engine.lose()
            case (message, payload):
                engine.receive(message, payload)
                if isinstance(message, EngineState) and engine.ready:
                    self._models = {spec.name: spec for spec in message.models}
                    async with self._changed:
                        self._changed.notify_all()


def _stopped() -> EngineUnavailable:
    return EngineUnavailable("the server is stopping; send the request again.", retry_after_s=_RETRY_AFTER_S)


class _EngineGone(Exception):
    """The engine ended with a flight on board; never seen outside this module."""


@dataclass
class _Flight:
    """One request at one engine, until its `landed` is done."""

    num_images: int
    landed: asyncio.Future[Result]
    watch: Watch | None
    images: dict[int, DrawnImage] = field(default_factory=dict)
    predicted_s: float | None = None


class _Engine:
    """One engine, seen through its connection."""

    def __init__(self, connection: EngineConnection) -> None:
        self.connection = connection
        self._connected = False
        self._told: EngineState | None = None  # since the connection stands
        self.load: Load | None = None
        self._flights: dict[str, _Flight] = {}

    @property
    def ready(self) -> bool:
        return self._told is not None and self._told.state == "ready"

    @property
    def num_images_in_flight(self) -> int:
        return sum(flight.num_images for flight in self._flights.values())

    def view(self) -> EngineView:
        if self._told is None:
            return EngineView("unknown", None, None)
        return EngineView(self._told.state, self._told.device, self._told.incarnation)

    async def draw(self, request: ImageRequest, watch: Watch | None) -> Result:
        # Two clients may send the same X-Request-Id, and a second try may meet the first: the engine knows each flight apart.
        flight_id = f"{request.request_id}.{secrets.token_hex(4)}"
        flight = _Flight(request.num_images, asyncio.get_running_loop().create_future(), watch)
        self._flights[flight_id] = flight
        try:
            await self.connection.send(Submit(msgspec.structs.replace(request, request_id=flight_id)))
            return await flight.landed
        except zmq.Again as error:  # it ended, and `Lost` is still on its way to us
            flight.landed.cancel()
            self.lose()
            raise _EngineGone from error
        except asyncio.CancelledError:
            with contextlib.suppress(zmq.ZMQError):
                await self.connection.send(Cancel(flight_id))
            raise
        finally:
            self._flights.pop(flight_id, None)

    async def greet(self) -> None:
        self._connected = True
        with contextlib.suppress(zmq.Again):  # it has ended again: another `Connected` follows
            await self.connection.send(Hello(f"frontend {os.getpid()}"))

    def lose(self) -> None:
        self._connected = False
        self._told = self.load = None
        for flight in self._flights.values():
            if not flight.landed.done():
                flight.landed.set_exception(_EngineGone())

    def receive(self, message: FromEngine, payload: memoryview | None) -> None:
        if not self._connected:  # a dead engine's last words, overtaken by the news of its death
            return
        match message:
            case EngineState():
                self._told = message
                return
            case Load():
                self.load = message
                return
            case Pong():  # asked for by the supervisor only
                return
        flight = self._flights.get(message.request_id)
        if flight is None or flight.landed.done():  # its caller has left
            return
        try:
            _take(flight, message, payload)
        except Exception:  # an engine's nonsense: it costs this request, not the link
            log.exception("%s: its engine's answer makes no sense", message.request_id)
            flight.landed.set_exception(
                GenerationFailed("the engine's answer makes no sense; the log has the details.")
            )


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
        case Finished(timings=timings, num_steps_run=num_steps_run):
            images = tuple(flight.images[index] for index in range(flight.num_images))
            assert flight.predicted_s is not None, "a request is accepted before it is finished"
            flight.landed.set_result(Result(images, timings, num_steps_run, flight.predicted_s))
        case Failed(code=code, message=text, field=field_name, retry_after_s=retry_after_s):
            kind: type[NoriaError] = all_codes().get(code, GenerationFailed)
            flight.landed.set_exception(kind(text, field=field_name, retry_after_s=retry_after_s))
