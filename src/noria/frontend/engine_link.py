"""The front end's end of the channel to the engines: which are ready, which takes a request, and what happens when one dies.

A request flies to the ready engine with the fewest images in flight. If that process ends, the request is sent again, with the same seed
and so for the same image, to another engine or to the same one when it is back. Whether it flies in company, alone, or no more, is
decided in `losses.py`, from what the engine's next life tells of the end. Who flies alone takes turns with the others who do; new
requests are drawn meanwhile. A caller that is cancelled takes its request out of the engine, and an engine's nonsense costs the
request it is about. This module knows no HTTP and never looks into pixels.
"""

import asyncio
import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import msgspec

from noria import messages
from noria.channel import Connected, EngineConnection, Lost
from noria.errors import DeadlineExceeded, EngineCrashed, EngineLost, EngineUnavailable
from noria.frontend.engine_peer import (
    DrawnImage,
    EngineGone,
    EnginePeer,
    EngineView,
    PreviewImage,
    Progress,
    Result,
    Update,
    Watch,
)
from noria.frontend.losses import MOST_EXCUSES_IN_COMPANY, Blame, Losses
from noria.messages import EngineState, Follow, FromEngine, Load, WheelView
from noria.observe import outcomes
from noria.observe.lines import fields
from noria.request import ImageRequest
from noria.spec import ModelSpec

__all__ = [
    "DrawnImage",
    "EngineLink",
    "EngineLoad",
    "EngineView",
    "PreviewImage",
    "Progress",
    "Result",
    "Update",
    "Watch",
]

_RETRY_AFTER_S = 5.0  # a small model is back within seconds, a large one within a minute: a polite first guess
_GRACE_S = 5.0  # the engine answers a missed deadline itself; this is for one that has stopped answering at all
_DEADLINE_GRACE_S = 0.5  # a caller with a deadline has other plans
_NEWS_WAIT_S = 5.0  # for an engine's next life to tell how the last one ended; a process starts within one

log = logging.getLogger("noria.frontend")


@dataclass(frozen=True)
class EngineLoad:
    """How busy the engines are, all together; `drain_s` is that of the one that takes the next request."""

    drain_s: float
    num_seated: int
    num_waiting: int
    num_slots: int


class EngineLink:
    """Connections to the engines at `addresses`, for as long as it is entered as an asynchronous context."""

    def __init__(self, addresses: Sequence[str], restart_wait_s: float = 60.0, name: str | None = None) -> None:
        """`name` is this front end's, the same in all its lives: engines drop what the life before has asked for. None: it has but one."""
        self._name = name or uuid.uuid4().hex
        self._addresses = tuple(addresses)
        self._restart_wait_s = restart_wait_s
        self._engines: list[EnginePeer] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Condition()
        self._alone = asyncio.Lock()  # held by the one request that is suspected of crashes and flies
        self._stopping = False
        self._timers: set[asyncio.Timeout] = set()  # of the calls of `submit` that run
        self._models: dict[str, ModelSpec] = {}
        # For who shows the engines to others; called in the event loop, and must not wait.
        self.on_change: Callable[[], None] = lambda: None
        self.on_view: Callable[[int, WheelView, memoryview | None], None] = lambda *_: None

    async def __aenter__(self) -> Self:
        self._engines = [EnginePeer(EngineConnection(address), self._name) for address in self._addresses]
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

    @property
    def num_engines(self) -> int:
        """As many as there are addresses."""
        return len(self._addresses)

    async def follow(self, number: int, message: Follow) -> None:
        """Ask the engine `number` for a view of its wheel, if it is ready; `on_view` will be told the answer."""
        await self._engines[number].follow(message)

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
            EngineLost: the engine ended with the request in flight, and none came back in time, or too often.
            EngineCrashed: the request crashes engines.
            DeadlineExceeded: `timeout_s` is over.
            NoriaError: whatever the engine answered.

        """
        if self._stopping:
            raise _stopped()
        if not self.ready:
            raise self.unavailable()
        started, limit_s = asyncio.get_running_loop().time(), _limit_s(request)
        timer = asyncio.timeout_at(started + limit_s + (_GRACE_S if request.deadline_s is None else _DEADLINE_GRACE_S))
        self._timers.add(timer)
        try:
            async with timer:
                return await self._fly(request, started, watch)
        except TimeoutError as error:
            if self._stopping:
                raise _stopped() from error
            raise DeadlineExceeded(f"not done after {limit_s:g} s.") from error
        finally:
            self._timers.discard(timer)

    def stop(self) -> None:
        """Fail every request in flight, and any to come, with EngineUnavailable: the end of a drain."""
        self._stopping = True
        for timer in self._timers:
            if not timer.expired():
                timer.reschedule(0.0)

    async def _fly(self, request: ImageRequest, started: float, watch: Watch | None) -> Result:
        """Flight after flight, until one lands or `losses.py` says that it is enough."""
        losses = Losses(num_excused=MOST_EXCUSES_IN_COMPANY) if request.alone else Losses()
        engine = await self._next_engine()
        draw = self._draw_alone(request, started, watch) if request.alone else engine.draw(request, watch)
        while True:
            try:
                return await draw
            except EngineGone as gone:
                if watch is not None:  # at once: whoever tells how the engine ended may take seconds
                    watch(Progress(0, 0, request.num_steps, None))
                blame = await self._blame(gone, losses.flies_alone)
            losses = losses.after(blame)
            said = fields(event="engine_lost", request_id=request.request_id, blame=blame, alone=losses.flies_alone)
            log.warning("%s: its engine ended; it is %s", request.request_id, blame, extra=said)
            _give_up(losses)
            draw = (self._draw_alone if losses.flies_alone else self._draw_again)(request, started, watch)

    async def _draw_again(self, request: ImageRequest, started: float, watch: Watch | None) -> Result:
        engine = await self._next_engine()
        return await engine.draw(_due(request, started), watch)

    async def _draw_alone(self, request: ImageRequest, started: float, watch: Watch | None) -> Result:
        while True:
            await self._next_engine()
            async with self._alone:  # the caller's deadline bounds the wait for a turn, too
                engine = self._least_loaded()
                if engine is not None:  # else the one before this has ended it
                    return await engine.draw(_due(msgspec.structs.replace(request, alone=True), started), watch)

    async def _next_engine(self) -> EnginePeer:
        """The engine that takes the next request, once there is one; raises EngineLost when none is back in time."""
        while (engine := self._least_loaded()) is None:
            try:
                async with asyncio.timeout(self._restart_wait_s), self._changed:
                    await self._changed.wait_for(lambda: self.ready)
            except TimeoutError as error:
                raise EngineLost(
                    f"the engine ended while it drew this request, and none was back after {self._restart_wait_s:g} s.",
                    retry_after_s=_RETRY_AFTER_S,
                ) from error
        return engine

    async def _blame(self, gone: EngineGone, was_alone: bool) -> Blame:
        """How a loss counts; waits for what the engine's next life tells. What nobody tells in time is held against the request.

        Where another engine could go on, that is after some seconds; but no second engine is risked for a request that was alone.
        """
        if gone.obituary is None:
            return "forgotten"
        obituary = gone.obituary
        patience_s = self._restart_wait_s if was_alone else min(_NEWS_WAIT_S, self._restart_wait_s)
        await asyncio.wait([obituary], timeout=patience_s)
        if not obituary.done() and not was_alone:
            try:
                async with asyncio.timeout(self._restart_wait_s - patience_s), self._changed:
                    await self._changed.wait_for(lambda: obituary.done() or self.ready)
            except TimeoutError:
                log.debug("%s: nobody has told how its engine ended", gone.flight_id)
        return obituary.result().blame(gone.flight_id) if obituary.done() else "suspected"

    def _least_loaded(self) -> EnginePeer | None:
        ready = [engine for engine in self._engines if engine.ready]
        return min(ready, key=lambda engine: engine.num_images_in_flight, default=None)

    async def _follow(self, engine: EnginePeer) -> None:
        try:
            async for event in engine.connection.events():
                await self._heard(engine, event)
        except Exception:  # a bug of ours or the engine's; /readyz tells
            log.exception("the link to an engine broke")
        finally:
            engine.lose()

    async def _heard(self, engine: EnginePeer, event: Connected | Lost | tuple[FromEngine, memoryview | None]) -> None:
        match event:
            case Connected():
                await engine.greet()
            case Lost():
                engine.lose()
                self.on_change()
            case (message, payload):
                if not engine.receive(message, payload):
                    return
                if isinstance(message, WheelView):
                    self.on_view(self._engines.index(engine), message, payload)
                if isinstance(message, Load):
                    await engine.thank()
                if isinstance(message, EngineState):
                    if engine.ready:
                        self._models = {spec.name: spec for spec in message.models}
                        outcomes.expect_models(self._models)
                    self.on_change()
                    async with self._changed:
                        self._changed.notify_all()


def _limit_s(request: ImageRequest) -> float:
    """After how long the request is of no use."""
    return request.timeout_s if request.deadline_s is None else min(request.timeout_s, request.deadline_s)


def _due(request: ImageRequest, started: float) -> ImageRequest:
    """The request as its next engine gets it: its times count from its arrival there, and some have passed at another.

    It was accepted, and no engine is asked again whether it can be in time: with a deadline it goes before others, and ends with it.
    """
    passed_s = asyncio.get_running_loop().time() - started
    return msgspec.structs.replace(
        request,
        timeout_s=max(_limit_s(request) - passed_s, 0.0),
        deadline_s=None,
        priority=request.priority if request.deadline_s is None else "high",
    )


def _give_up(losses: Losses) -> None:
    """Raise, if a request with these losses is not to fly again."""
    if losses.is_convicted:
        raise EngineCrashed(
            f"the engine crashed {losses.num_crashes} times while it drew this request, the last time with nothing else aboard."
        )
    if losses.is_hopeless:
        raise EngineLost(
            f"the engine was killed {losses.num_excused + losses.num_excused_alone} times while it drew this request.",
            retry_after_s=_RETRY_AFTER_S,
        )


def _stopped() -> EngineUnavailable:
    return EngineUnavailable("the server is stopping; send the request again.", retry_after_s=_RETRY_AFTER_S)
