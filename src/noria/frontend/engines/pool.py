"""The front end's connections to the engines: routes each request to one and retries requests that an engine loses.

`router.py` chooses among the ready engines that hold the request's model. If that engine's process ends, the request is
sent again, with the same seed and so for the same images, to another engine or to the same one after its restart.
`crash_attribution.py` decides, from how the engine ended, whether the retry shares the engine with other requests, is
exclusive, or does not happen. Exclusive retries run one at a time; new requests are served meanwhile. A cancelled call
cancels its request at the engine, and an invalid reply fails only its own request. This module knows no HTTP and does
not read pixels.
"""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

import msgspec

from noria.errors import DeadlineExceeded, EngineCrashed, EngineLost, EngineUnavailable
from noria.frontend.engines.client import (
    AttemptLostError,
    EngineClient,
    EngineResult,
    EngineStatus,
    OnUpdate,
    ProgressUpdate,
)
from noria.frontend.engines.crash_attribution import MAX_NOT_AT_FAULT_SHARED, AttemptHistory, LossCause
from noria.frontend.engines.router import holds, route
from noria.frontend.engines.version_choice import VersionChooser
from noria.observe.logs.log_record import fields
from noria.observe.metrics import outcomes
from noria.protocol import messages
from noria.protocol.messages import EngineLoad, EngineState, EngineView, ViewRequest
from noria.protocol.model_spec import ModelKey, ModelSpec
from noria.protocol.request import AnyRequest
from noria.protocol.routes import Routes
from noria.protocol.transport import Connected, ConnectionEvent, Disconnected, EngineConnection

_RETRY_AFTER_S = 5.0  # an engine restarts within seconds with a small model, within a minute with a large one
# Engines report a missed deadline themselves; these are for an engine that does not answer.
_GRACE_S = 5.0
_DEADLINE_GRACE_S = 0.5  # of a request with a deadline of its client
_EXIT_REPORT_TIMEOUT_S = 5.0  # for the report of an engine's next process, which starts within 1 s

SpecT = TypeVar("SpecT", bound=ModelSpec)

log = logging.getLogger("noria.frontend")


@dataclass(frozen=True)
class PoolLoad:
    """The load of the engines that hold one model, together. `backlog_s` is that of the least busy engine."""

    backlog_s: float
    num_running: int
    num_waiting: int
    num_slots: int


class EnginePool:
    """The engines at `addresses`. An asynchronous context manager: connects on entry, disconnects on exit."""

    def __init__(
        self,
        addresses: Sequence[str],
        restart_wait_s: float = 60.0,
        name: str | None = None,
        default_models: Mapping[str, str] | None = None,
        first_states_wait_s: float = 0.0,
    ) -> None:
        """`name` identifies this front end; None: a random one.

        When a front end of this name reconnects, engines cancel its previous requests. `default_models` has the name of
        each kind's default model; None: the first one of the first engine. `first_states_wait_s` is how long the entry
        waits for the states of all engines.
        """
        self._name = name or uuid.uuid4().hex
        self._addresses = tuple(addresses)
        self._restart_wait_s, self._first_states_wait_s = restart_wait_s, first_states_wait_s
        self._engines: list[EngineClient] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Condition()
        self._exclusive_lock = asyncio.Lock()  # held by the one exclusive attempt in flight
        self._stopping = False
        self._timers: set[asyncio.Timeout] = set()  # of all running calls of `submit`
        self._models: dict[str, ModelSpec] = {}
        self._known: set[ModelKey] = set()
        self._default_models = default_models or {}
        self.versions = VersionChooser(self._find_ready)
        # Called with the models that became known; must not block.
        self.on_models: Callable[[Iterable[ModelSpec]], None] = lambda _: None
        # For the live view; called in the event loop, must not block. `on_view` gets engine number, view and
        # thumbnails.
        self.on_change: Callable[[], None] = lambda: None
        self.on_view: Callable[[int, EngineView, memoryview | None], None] = lambda *_: None

    async def __aenter__(self) -> Self:
        self._engines = [EngineClient(EngineConnection(address), self._name) for address in self._addresses]
        self._tasks = [asyncio.create_task(self._read_events(engine)) for engine in self._engines]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._first_states_wait_s), self._changed:
                await self._changed.wait_for(lambda: all(engine.state != "unknown" for engine in self.engines))
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for engine in self._engines:
            engine.connection.close()

    @property
    def ready(self) -> bool:
        """Whether of each kind of model that is served an engine is ready for a request."""
        kinds = {spec.kind for engine in self._engines for spec in engine.models}
        return bool(kinds) and kinds >= self._default_models.keys()

    @property
    def models(self) -> Mapping[str, ModelSpec]:
        """The models served, by name, the default ones first, as the engines last reported them; empty until then.

        Of several versions of a model it is the control, from which `versions` chooses the one that answers a request.
        """
        return self._models

    def follow(self, routes: Routes) -> None:
        """Serve the versions of these routes from now on."""
        self.versions.follow(routes)
        self._update_models()
        self.on_change()

    def models_of(self, spec_type: type[SpecT]) -> Mapping[str, SpecT]:
        """The models of one kind among `models`."""
        return {name: spec for name, spec in self._models.items() if isinstance(spec, spec_type)}

    def default_model(self, spec_type: type[SpecT]) -> SpecT:
        """The default model of one kind. Raises EngineUnavailable until an engine has reported it."""
        models = self.models_of(spec_type)
        name = self._default_models.get(spec_type.kind, next(iter(models), ""))
        if name not in models:
            raise self.unavailable_error(repr(name) if name else f"a {spec_type.kind} model")
        return models[name]

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of models that the server has, loaded or not; empty as long as none is known."""
        return frozenset(self._default_models) | {spec.kind for spec in self._models.values()}

    def serves(self, spec_type: type[ModelSpec]) -> bool:
        """Whether the server has models of this kind, loaded or not; true as long as none of its models is known."""
        return not self._models or spec_type.kind in self.kinds

    def find_model(self, name: str, version: str) -> ModelSpec | None:
        """The model in this version, if any engine held it when it last reported."""
        known = (spec for engine in self._engines for spec in engine.known_models)
        return next((spec for spec in known if spec.matches(name, version)), None)

    def _find_ready(self, name: str, version: str) -> ModelSpec | None:
        """The model in this version, if a ready engine holds it."""
        held = (spec for engine in self._engines for spec in engine.models)
        return next((spec for spec in held if spec.matches(name, version)), None)

    def ready_models(self, spec_type: type[ModelSpec] = ModelSpec) -> set[ModelKey]:
        """Name and version of each model, by default of any kind, that a ready engine holds."""
        return {spec.key for engine in self._engines for spec in engine.models if isinstance(spec, spec_type)}

    def backlog_s(self, spec: ModelSpec) -> float:
        """The backlog of the least busy engine that holds this version of the model; 0 if none has reported one."""
        return min((load.backlog_s for load in self._loads(spec)), default=0.0)

    def load(self, spec: ModelSpec) -> PoolLoad:
        """The load of the ready engines that hold this version of the model among others, as last reported."""
        loads = self._loads(spec)
        return PoolLoad(
            self.backlog_s(spec),
            sum(load.num_running for load in loads),
            sum(load.num_waiting for load in loads),
            sum(load.num_slots for load in loads),
        )

    def _loads(self, spec: ModelSpec) -> list[EngineLoad]:
        engines = [engine for engine in self._engines if holds(engine, spec.name, spec.fingerprint)]
        return [engine.load for engine in engines if engine.load is not None]

    def num_slots(self, spec_type: type[ModelSpec]) -> int:
        """The slots of all ready engines with models of one kind, as last reported; 0 until then."""
        return sum(
            engine.load.num_slots
            for engine in self._engines
            if engine.load is not None and any(isinstance(spec, spec_type) for spec in engine.models)
        )

    def costs(self, spec: ModelSpec) -> list[messages.ShapeCosts]:
        """Return the costs that the ready engines with this version of the model measured, in the engines' order."""
        return [costs for load in self._loads(spec) for costs in load.costs if spec.matches(costs.model, costs.version)]

    @property
    def engines(self) -> list[EngineStatus]:
        """The state of each engine, in the order of their addresses."""
        return [engine.status() for engine in self._engines]

    @property
    def num_engines(self) -> int:
        """The number of engines, ready or not."""
        return len(self._addresses)

    async def request_view(self, number: int, message: ViewRequest) -> None:
        """Ask engine `number` for a view of its running batch, if it is ready. The view goes to `on_view`."""
        await self._engines[number].request_view(message)

    def unavailable_error(self, needed: str) -> EngineUnavailable:
        """Return a request's error while no engine that holds `needed` is ready; `needed` is part of its message."""
        states = ", ".join(f"engine {number} is {status.state}" for number, status in enumerate(self.engines))
        which = f"no engine that holds {needed}" if any(engine.ready for engine in self._engines) else "no engine"
        return EngineUnavailable(
            f"{which} is ready ({states}); try again in a few seconds.", retry_after_s=_RETRY_AFTER_S
        )

    async def submit(
        self, request: AnyRequest, on_update: OnUpdate | None = None, data: bytes | None = None
    ) -> EngineResult:
        """Generate the images of `request`; `data` is what its payload has beside it.

        Cancelling this call removes the request from its engine at the next step.

        Raises:
            EngineUnavailable: no engine that holds the model is ready, or `stop` was called.
            EngineLost: the engine ended with the request in flight, and no engine came back in time, or this happened
                too often.
            EngineCrashed: the request crashes engines.
            DeadlineExceeded: `timeout_s` or `deadline_s` has passed.
            NoriaError: the engine's rejection or failure.

        """
        if self._stopping:
            raise _stopped_error()
        if (engine := self._route(request)) is None:
            raise self.unavailable_error(f"{request.model!r} in version {request.model_version or 'any'}")
        started, limit_s = asyncio.get_running_loop().time(), _limit_s(request)
        timer = asyncio.timeout_at(started + limit_s + (_GRACE_S if request.deadline_s is None else _DEADLINE_GRACE_S))
        self._timers.add(timer)
        try:
            async with timer:
                return await self._submit_with_retries(engine, request, started, on_update, data)
        except TimeoutError as error:
            if self._stopping:
                raise _stopped_error() from error
            raise DeadlineExceeded(f"not done after {limit_s:g} s.") from error
        finally:
            self._timers.discard(timer)

    def stop(self) -> None:
        """Fail every request in flight, and all later ones, with EngineUnavailable. Called at the end of a drain."""
        self._stopping = True
        for timer in self._timers:
            if not timer.expired():
                timer.reschedule(0.0)

    async def _submit_with_retries(
        self, engine: EngineClient, request: AnyRequest, started: float, on_update: OnUpdate | None, data: bytes | None
    ) -> EngineResult:
        """Attempt until a reply arrives or `crash_attribution.py` allows no further attempt."""
        history = AttemptHistory(num_not_at_fault=MAX_NOT_AT_FAULT_SHARED) if request.exclusive else AttemptHistory()
        attempt = (
            self._submit_exclusive(request, started, on_update, data)
            if request.exclusive
            else engine.submit(request, on_update, data)
        )
        while True:
            try:
                return await attempt
            except AttemptLostError as lost:
                if on_update is not None:  # at once: the report of how the engine ended may take seconds
                    on_update(ProgressUpdate(0, 0, request.payload.num_steps, None))
                cause = await self._classify_loss(lost, request, history.needs_exclusive)
            history = history.with_loss(cause)
            extra = fields(
                event="engine_lost",
                request_id=request.request_id,
                key=request.client or None,
                loss_cause=cause,
                exclusive=history.needs_exclusive,
            )
            log.warning("%s: its engine ended; cause of the loss: %s", request.request_id, cause, extra=extra)
            _raise_if_exhausted(history)
            attempt = (self._submit_exclusive if history.needs_exclusive else self._resubmit)(
                request, started, on_update, data
            )

    async def _resubmit(
        self, request: AnyRequest, started: float, on_update: OnUpdate | None, data: bytes | None
    ) -> EngineResult:
        engine = await self._wait_for_engine(request)
        return await engine.submit(_remaining(request, started), on_update, data)

    async def _submit_exclusive(
        self, request: AnyRequest, started: float, on_update: OnUpdate | None, data: bytes | None
    ) -> EngineResult:
        while True:
            await self._wait_for_engine(request)
            async with self._exclusive_lock:  # the request's timeout also bounds the wait for the lock
                engine = self._route(request)
                if engine is not None:  # None: the previous exclusive attempt has crashed it
                    return await engine.submit(
                        _remaining(msgspec.structs.replace(request, exclusive=True), started), on_update, data
                    )

    async def _wait_for_engine(self, request: AnyRequest) -> EngineClient:
        """Wait until an engine can serve the request and return it. Raises EngineLost if none is ready in time."""
        while (engine := self._route(request)) is None:
            try:
                async with asyncio.timeout(self._restart_wait_s), self._changed:
                    await self._changed.wait_for(lambda: self._route(request) is not None)
            except TimeoutError as error:
                raise EngineLost(
                    f"the engine ended while it generated this request, and none that holds its model was ready after "
                    f"{self._restart_wait_s:g} s.",
                    retry_after_s=_RETRY_AFTER_S,
                ) from error
        return engine

    async def _classify_loss(self, lost: AttemptLostError, request: AnyRequest, was_exclusive: bool) -> LossCause:
        """Wait for the report of how the engine ended. Return how the loss counts.

        It is "suspected" if no report comes in time. If another engine is ready, the wait ends after a few seconds; but
        a request whose attempt was exclusive waits as long as for a restart, so that it does not crash a second engine.
        """
        if lost.exit_report is None:
            return "not_started"
        exit_report = lost.exit_report
        timeout_s = self._restart_wait_s if was_exclusive else min(_EXIT_REPORT_TIMEOUT_S, self._restart_wait_s)
        await asyncio.wait([exit_report], timeout=timeout_s)
        if not exit_report.done() and not was_exclusive:
            try:
                async with asyncio.timeout(self._restart_wait_s - timeout_s), self._changed:
                    await self._changed.wait_for(lambda: exit_report.done() or self._route(request) is not None)
            except TimeoutError:
                log.debug("%s: no report of how its engine ended", lost.attempt_id)
        return exit_report.result().loss_cause(lost.attempt_id) if exit_report.done() else "suspected"

    def _route(self, request: AnyRequest) -> EngineClient | None:
        return route(self._engines, request.model, request.model_version)

    async def _read_events(self, engine: EngineClient) -> None:
        try:
            async for event in engine.connection.events():
                await self._handle_event(engine, event)
        except Exception:  # a bug in the front end or the engine; /readyz shows the engine as unknown
            log.exception("the connection to an engine failed")
        finally:
            engine.handle_disconnect()

    async def _handle_event(self, engine: EngineClient, event: ConnectionEvent) -> None:
        match event:
            case Connected():
                await engine.send_hello()
            case Disconnected():
                engine.handle_disconnect()
                self.on_change()
            case (message, data):
                if not engine.receive(message, data):
                    return
                if isinstance(message, EngineView):
                    self.on_view(self._engines.index(engine), message, data)
                if isinstance(message, EngineLoad):
                    await engine.ack_load()
                if isinstance(message, EngineState):
                    if engine.ready:
                        self._update_models()
                        outcomes.init_model_series(self._models)
                    self.on_change()
                    async with self._changed:
                        self._changed.notify_all()

    def _update_models(self) -> None:
        known = [spec for engine in self._engines for spec in engine.known_models]
        known.sort(key=lambda spec: (spec.name != self._default_models.get(spec.kind), not self._is_control(spec)))
        self._models = {}
        for spec in known:
            self._models.setdefault(spec.name, spec)
        new = [spec for spec in known if spec.key not in self._known]
        self._known = {spec.key for spec in known}
        self.on_models(new)

    def _is_control(self, spec: ModelSpec) -> bool:
        """Whether requests that go to no canary go to this version."""
        control = self.versions.control_version(spec.name)
        if control is None:
            return spec.fingerprint != self.versions.canary_version(spec.name)
        return spec.fingerprint == control


def _limit_s(request: AnyRequest) -> float:
    """Return after how many seconds the result is of no use to the client."""
    return request.timeout_s if request.deadline_s is None else min(request.timeout_s, request.deadline_s)


def _remaining(request: AnyRequest, started: float) -> AnyRequest:
    """Return the request for its next attempt, with the time that is left: engines count from the arrival.

    It was accepted once, so it is not checked against its deadline again: the deadline becomes a timeout and high
    priority.
    """
    passed_s = asyncio.get_running_loop().time() - started
    return msgspec.structs.replace(
        request,
        timeout_s=max(_limit_s(request) - passed_s, 0.0),
        deadline_s=None,
        priority=request.priority if request.deadline_s is None else "high",
    )


def _raise_if_exhausted(history: AttemptHistory) -> None:
    """Raise if a request with these losses is not retried."""
    if history.crashes_engines:
        raise EngineCrashed(
            f"the engine crashed {history.num_crashes} times while it generated this request, the last time with "
            "nothing else in flight."
        )
    if history.retries_exhausted:
        num_kills = history.num_not_at_fault + history.num_not_at_fault_exclusive
        raise EngineLost(
            f"the engine was killed {num_kills} times while it generated this request.", retry_after_s=_RETRY_AFTER_S
        )


def _stopped_error() -> EngineUnavailable:
    return EngineUnavailable("the server is stopping; send the request again.", retry_after_s=_RETRY_AFTER_S)
