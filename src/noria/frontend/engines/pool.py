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

from noria.errors import DeadlineExceeded, EngineCrashed, EngineLost, EngineUnavailable
from noria.frontend.engines.client import (
    AttemptLostError,
    EngineClient,
    EngineResult,
    EngineStatus,
    OnUpdate,
    PreviewImage,
    ProgressUpdate,
    RawImage,
    Update,
)
from noria.frontend.engines.crash_attribution import MAX_EXCUSED_SHARED, AttemptHistory, LossCause
from noria.observe.logs.log_record import fields
from noria.observe.metrics import outcomes
from noria.protocol import messages
from noria.protocol.messages import EngineLoad, EngineState, EngineView, FromEngine, ViewRequest
from noria.protocol.model_spec import ModelSpec
from noria.protocol.request import ImageRequest
from noria.protocol.transport import Connected, Disconnected, EngineConnection

__all__ = [
    "EnginePool",
    "EngineResult",
    "EngineStatus",
    "OnUpdate",
    "PoolLoad",
    "PreviewImage",
    "ProgressUpdate",
    "RawImage",
    "Update",
]

_RETRY_AFTER_S = 5.0  # a small model is back within seconds, a large one within a minute: a polite first guess
_GRACE_S = 5.0  # the engine answers a missed deadline itself; this is for one that has stopped answering at all
_DEADLINE_GRACE_S = 0.5  # a caller with a deadline has other plans
_EXIT_REPORT_TIMEOUT_S = 5.0  # for an engine's next life to tell how the last one ended; a process starts within one

log = logging.getLogger("noria.frontend")


@dataclass(frozen=True)
class PoolLoad:
    """How busy the engines are, all together; `drain_s` is that of the one that takes the next request."""

    backlog_s: float
    num_running: int
    num_waiting: int
    num_slots: int


class EnginePool:
    """Connections to the engines at `addresses`, for as long as it is entered as an asynchronous context."""

    def __init__(self, addresses: Sequence[str], restart_wait_s: float = 60.0, name: str | None = None) -> None:
        """`name` is this front end's, the same in all its lives: engines drop what the life before has asked for. None: it has but one."""
        self._name = name or uuid.uuid4().hex
        self._addresses = tuple(addresses)
        self._restart_wait_s = restart_wait_s
        self._engines: list[EngineClient] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Condition()
        self._exclusive_lock = asyncio.Lock()  # held by the one request that is suspected of crashes and flies
        self._stopping = False
        self._timers: set[asyncio.Timeout] = set()  # of the calls of `submit` that run
        self._models: dict[str, ModelSpec] = {}
        # For who shows the engines to others; called in the event loop, and must not wait.
        self.on_change: Callable[[], None] = lambda: None
        self.on_view: Callable[[int, EngineView, memoryview | None], None] = lambda *_: None

    async def __aenter__(self) -> Self:
        self._engines = [EngineClient(EngineConnection(address), self._name) for address in self._addresses]
        self._tasks = [asyncio.create_task(self._read_events(engine)) for engine in self._engines]
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
    def load(self) -> PoolLoad:
        """How busy the engines were when they last told."""
        loads = [engine.load for engine in self._engines if engine.ready and engine.load is not None]
        return PoolLoad(
            min((load.backlog_s for load in loads), default=0.0),
            sum(load.num_running for load in loads),
            sum(load.num_waiting for load in loads),
            sum(load.num_slots for load in loads),
        )

    def costs(self, model: str) -> list[messages.ShapeCosts]:
        """What the engines have measured of a model, in the order of the engines."""
        reported = [engine.load.costs for engine in self._engines if engine.load is not None]
        return [costs for engine_costs in reported for costs in engine_costs if costs.model == model]

    @property
    def engines(self) -> list[EngineStatus]:
        """What is known of each engine, in the order of their addresses."""
        return [engine.status() for engine in self._engines]

    @property
    def num_engines(self) -> int:
        """As many as there are addresses."""
        return len(self._addresses)

    async def request_view(self, number: int, message: ViewRequest) -> None:
        """Ask the engine `number` for a view of its wheel, if it is ready; `on_view` will be told the answer."""
        await self._engines[number].request_view(message)

    def unavailable_error(self) -> EngineUnavailable:
        """The refusal of a request while no engine is ready."""
        states = ", ".join(f"engine {number} is {status.state}" for number, status in enumerate(self.engines))
        return EngineUnavailable(
            f"no engine is ready ({states}); try again in a few seconds.", retry_after_s=_RETRY_AFTER_S
        )

    async def submit(self, request: ImageRequest, on_update: OnUpdate | None = None) -> EngineResult:
        """Have `request` drawn; `watch` hears of its way. A cancelled call takes it out of the engine at its next step.

        Raises:
            EngineUnavailable: at once, when no engine is ready; or at `stop`.
            EngineLost: the engine ended with the request in flight, and none came back in time, or too often.
            EngineCrashed: the request crashes engines.
            DeadlineExceeded: `timeout_s` is over.
            NoriaError: whatever the engine answered.

        """
        if self._stopping:
            raise _stopped_error()
        if not self.ready:
            raise self.unavailable_error()
        started, limit_s = asyncio.get_running_loop().time(), _limit_s(request)
        timer = asyncio.timeout_at(started + limit_s + (_GRACE_S if request.deadline_s is None else _DEADLINE_GRACE_S))
        self._timers.add(timer)
        try:
            async with timer:
                return await self._submit_with_retries(request, started, on_update)
        except TimeoutError as error:
            if self._stopping:
                raise _stopped_error() from error
            raise DeadlineExceeded(f"not done after {limit_s:g} s.") from error
        finally:
            self._timers.discard(timer)

    def stop(self) -> None:
        """Fail every request in flight, and any to come, with EngineUnavailable: the end of a drain."""
        self._stopping = True
        for timer in self._timers:
            if not timer.expired():
                timer.reschedule(0.0)

    async def _submit_with_retries(
        self, request: ImageRequest, started: float, on_update: OnUpdate | None
    ) -> EngineResult:
        """Flight after flight, until one lands or `losses.py` says that it is enough."""
        history = AttemptHistory(num_excused=MAX_EXCUSED_SHARED) if request.exclusive else AttemptHistory()
        engine = await self._wait_for_engine()
        attempt = (
            self._submit_exclusive(request, started, on_update)
            if request.exclusive
            else engine.submit(request, on_update)
        )
        while True:
            try:
                return await attempt
            except AttemptLostError as lost:
                if on_update is not None:  # at once: whoever tells how the engine ended may take seconds
                    on_update(ProgressUpdate(0, 0, request.num_steps, None))
                cause = await self._classify_loss(lost, history.needs_exclusive)
            history = history.with_loss(cause)
            extra = fields(
                event="engine_lost", request_id=request.request_id, blame=cause, alone=history.needs_exclusive
            )
            log.warning("%s: its engine ended; it is %s", request.request_id, cause, extra=extra)
            _raise_if_exhausted(history)
            attempt = (self._submit_exclusive if history.needs_exclusive else self._resubmit)(
                request, started, on_update
            )

    async def _resubmit(self, request: ImageRequest, started: float, on_update: OnUpdate | None) -> EngineResult:
        engine = await self._wait_for_engine()
        return await engine.submit(_remaining(request, started), on_update)

    async def _submit_exclusive(
        self, request: ImageRequest, started: float, on_update: OnUpdate | None
    ) -> EngineResult:
        while True:
            await self._wait_for_engine()
            async with self._exclusive_lock:  # the caller's deadline bounds the wait for a turn, too
                engine = self._least_loaded()
                if engine is not None:  # else the one before this has ended it
                    return await engine.submit(
                        _remaining(msgspec.structs.replace(request, alone=True), started), on_update
                    )

    async def _wait_for_engine(self) -> EngineClient:
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

    async def _classify_loss(self, lost: AttemptLostError, was_exclusive: bool) -> LossCause:
        """How a loss counts; waits for what the engine's next life tells. What nobody tells in time is held against the request.

        Where another engine could go on, that is after some seconds; but no second engine is risked for a request that was alone.
        """
        if lost.exit_report is None:
            return "forgotten"
        exit_report = lost.exit_report
        timeout_s = self._restart_wait_s if was_exclusive else min(_EXIT_REPORT_TIMEOUT_S, self._restart_wait_s)
        await asyncio.wait([exit_report], timeout=timeout_s)
        if not exit_report.done() and not was_exclusive:
            try:
                async with asyncio.timeout(self._restart_wait_s - timeout_s), self._changed:
                    await self._changed.wait_for(lambda: exit_report.done() or self.ready)
            except TimeoutError:
                log.debug("%s: nobody has told how its engine ended", lost.attempt_id)
        return exit_report.result().loss_cause(lost.attempt_id) if exit_report.done() else "suspected"

    def _least_loaded(self) -> EngineClient | None:
        ready = [engine for engine in self._engines if engine.ready]
        return min(ready, key=lambda engine: engine.num_images_in_flight, default=None)

    async def _read_events(self, engine: EngineClient) -> None:
        try:
            async for event in engine.connection.events():
                await self._handle_event(engine, event)
        except Exception:  # a bug of ours or the engine's; /readyz tells
            log.exception("the link to an engine broke")
        finally:
            engine.handle_disconnect()

    async def _handle_event(
        self, engine: EngineClient, event: Connected | Disconnected | tuple[FromEngine, memoryview | None]
    ) -> None:
        match event:
            case Connected():
                await engine.send_hello()
            case Disconnected():
                engine.handle_disconnect()
                self.on_change()
            case (message, payload):
                if not engine.receive(message, payload):
                    return
                if isinstance(message, EngineView):
                    self.on_view(self._engines.index(engine), message, payload)
                if isinstance(message, EngineLoad):
                    await engine.ack_load()
                if isinstance(message, EngineState):
                    if engine.ready:
                        self._models = {spec.name: spec for spec in message.models}
                        outcomes.init_model_series(self._models)
                    self.on_change()
                    async with self._changed:
                        self._changed.notify_all()


def _limit_s(request: ImageRequest) -> float:
    """After how long the request is of no use."""
    return request.timeout_s if request.deadline_s is None else min(request.timeout_s, request.deadline_s)


def _remaining(request: ImageRequest, started: float) -> ImageRequest:
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


def _raise_if_exhausted(history: AttemptHistory) -> None:
    """Raise, if a request with these losses is not to fly again."""
    if history.crashes_engines:
        raise EngineCrashed(
            f"the engine crashed {history.num_crashes} times while it drew this request, the last time with nothing else aboard."
        )
    if history.retries_exhausted:
        raise EngineLost(
            f"the engine was killed {history.num_excused + history.num_excused_exclusive} times while it drew this request.",
            retry_after_s=_RETRY_AFTER_S,
        )


def _stopped_error() -> EngineUnavailable:
    return EngineUnavailable("the server is stopping; send the request again.", retry_after_s=_RETRY_AFTER_S)
