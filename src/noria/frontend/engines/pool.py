"""The front end's connections to the engines: what they hold and how busy they are, as they last reported.

`router.py` chooses among the ready engines that hold a request's model, `retries.py` submits the request. An invalid
reply fails only its own request. This module knows no HTTP and does not read pixels.
"""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self, TypeVar

from noria.errors import EngineUnavailable
from noria.frontend.engines.client import EngineClient, EngineStatus
from noria.frontend.engines.rebalancing import rebalance
from noria.frontend.engines.results import EngineResult, OnUpdate
from noria.frontend.engines.retries import RETRY_AFTER_S, RetryingSubmitter
from noria.frontend.engines.router import holds, route
from noria.frontend.engines.shadow_mirror import ShadowMirror
from noria.frontend.engines.version_choice import VersionChooser
from noria.observe.metrics import outcomes
from noria.protocol import messages
from noria.protocol.messages import EngineLoad, EngineState, EngineView, ViewRequest, engine_name
from noria.protocol.model_spec import ModelKey, ModelSpec
from noria.protocol.request import AnyRequest
from noria.protocol.routes import Routes
from noria.protocol.transport import Connected, ConnectionEvent, Disconnected, EngineConnection, EngineEndpoint

SpecT = TypeVar("SpecT", bound=ModelSpec)

log = logging.getLogger("noria.frontend")

_UPKEEP_INTERVAL_S = 1.0


@dataclass(frozen=True)
class PoolLoad:
    """The load of the engines that hold one model, together. `backlog_s` is that of the least busy engine."""

    backlog_s: float
    num_running: int
    num_waiting: int
    num_slots: int


class EnginePool:
    """The engines at `addresses`, or those of `set_engines`.

    An asynchronous context manager: connects on entry, disconnects on exit.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        restart_wait_s: float = 60.0,
        name: str | None = None,
        default_models: Mapping[str, str] | None = None,
        first_states_wait_s: float = 0.0,
        *,
        rebalance: bool = True,
    ) -> None:
        """`name` identifies this front end; None: a random one.

        When a front end of this name reconnects, engines cancel its previous requests. `default_models` has the name of
        each kind's default model; None: the first one of the first engine. `first_states_wait_s` is how long the entry
        waits for the states of all engines. `rebalance` is whether requests move from busy engines to others.
        """
        self._name = name or uuid.uuid4().hex
        self._endpoints = [EngineEndpoint(engine_name(number), each) for number, each in enumerate(addresses)]
        self._is_open, self._rebalance = False, rebalance
        self._first_states_wait_s = first_states_wait_s
        self._engines: list[EngineClient] = []
        self._tasks: dict[EngineEndpoint, asyncio.Task[None]] = {}
        self._upkeep: asyncio.Task[None] | None = None
        self._groups: dict[str, int] = {}  # their order
        self._left_models: dict[str, tuple[ModelSpec, ...]] = {}  # of the last engine that left, by its group
        self._changed = asyncio.Condition()
        self._submitter = RetryingSubmitter(self._route, self.unavailable_error, self._changed, restart_wait_s)
        self._models: dict[str, ModelSpec] = {}
        self._known: set[ModelKey] = set()
        self._default_models = default_models or {}
        self.versions = VersionChooser(self._find_ready)
        self.shadows = ShadowMirror(self.versions, self._find_ready, self._route)
        # Called with the models that became known; must not block.
        self.on_models: Callable[[Iterable[ModelSpec]], None] = lambda _: None
        # For the live view; called in the event loop, must not block. `on_view` gets the engine's name, view and
        # thumbnails.
        self.on_change: Callable[[], None] = lambda: None
        self.on_view: Callable[[str, EngineView, memoryview | None], None] = lambda *_: None

    async def __aenter__(self) -> Self:
        self._is_open = True
        for endpoint in self._endpoints:
            self._add(endpoint)
        self._upkeep = asyncio.create_task(self._keep_up())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._first_states_wait_s), self._changed:
                await self._changed.wait_for(lambda: all(engine.state != "unknown" for engine in self.engines))
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_open = False
        await self.shadows.close()
        tasks = [*self._tasks.values(), *([] if self._upkeep is None else [self._upkeep])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for engine in self._engines:
            engine.connection.close()

    def set_engines(self, endpoints: Iterable[EngineEndpoint], groups: Sequence[str] = ()) -> None:
        """Use these engines from now on, in this order. To be called in the event loop.

        `groups` are all groups of engines, the default models' first, also those that have no engine now.
        One that is no longer among them gets no more requests; when those that it has are done, or its connection is
        lost, it is forgotten.
        """
        self._endpoints, self._groups = list(endpoints), {name: number for number, name in enumerate(groups)}
        if not self._is_open:
            return
        present = {engine.endpoint: engine for engine in self._engines}
        for endpoint in self._endpoints:
            if endpoint in present:
                present[endpoint].is_leaving = False
            else:
                self._add(endpoint)
        for endpoint in present.keys() - set(self._endpoints):
            present[endpoint].is_leaving = True
        order = {endpoint: number for number, endpoint in enumerate(self._endpoints)}
        self._engines.sort(key=lambda engine: order.get(engine.endpoint, len(order)))
        self._remove_left()
        self._update_models()
        self.on_change()

    def _add(self, endpoint: EngineEndpoint) -> None:
        connection = EngineConnection(endpoint.address, endpoint.secret_key)
        engine = EngineClient(connection, self._name, endpoint)
        self._engines.append(engine)
        self._tasks[endpoint] = asyncio.create_task(self._read_events(engine))

    def _remove_left(self) -> None:
        """Forget the engines that leave and have nothing more to do."""
        for engine in [each for each in self._engines if each.is_leaving]:
            if engine.is_connected and engine.num_results_in_flight:
                continue
            self._engines.remove(engine)
            if engine.known_models:
                self._left_models[engine.endpoint.group] = engine.known_models
            self._tasks.pop(engine.endpoint).cancel()
            engine.remove()

    async def _keep_up(self) -> None:
        """Renew the leases at engines on other machines, forget the engines that have left, and move requests."""
        while True:
            await asyncio.sleep(_UPKEEP_INTERVAL_S)
            for engine in list(self._engines):
                if engine.endpoint.is_remote:
                    await engine.ping()
            self._remove_left()
            await self._move_requests()
            if self._rebalance:
                await rebalance(self._engines, asyncio.get_running_loop().time())

    async def _move_requests(self) -> None:
        """Move the requests of engines that leave, or release their model, to engines that hold it."""
        for engine in list(self._engines):
            await engine.release(lambda request: self._route(request) is not None)

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
        return next((spec for spec in self._known_models() if spec.matches(name, version)), None)

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

    def precision(self, spec: ModelSpec) -> messages.ModelPrecision | None:
        """Return in which form the first ready engine with this version of a text encoder computes it."""
        found = (each for load in self._loads(spec) for each in load.precisions)
        return next((each for each in found if spec.matches(each.model, each.version)), None)

    @property
    def engines(self) -> list[EngineStatus]:
        """The state of each engine, in the order of their addresses."""
        return [engine.status() for engine in self._engines]

    def held_models(self) -> list[tuple[EngineStatus, tuple[ModelSpec, ...]]]:
        """The state of each engine, and the models that it held when it last reported."""
        return [(engine.status(), engine.known_models) for engine in self._engines]

    @property
    def engine_names(self) -> list[str]:
        """The names of all engines, ready or not, in the order of `engines`."""
        return [engine.endpoint.name for engine in self._engines] or [each.name for each in self._endpoints]

    async def request_view(self, name: str, message: ViewRequest) -> None:
        """Ask engine `name` for a view of its running batch, if it is ready. The view goes to `on_view`."""
        for engine in self._engines:
            if engine.endpoint.name == name:
                await engine.request_view(message)

    def unavailable_error(self, needed: str) -> EngineUnavailable:
        """Return a request's error while no engine that holds `needed` is ready; `needed` is part of its message."""
        states = ", ".join(f"engine {number} is {status.state}" for number, status in enumerate(self.engines))
        which = f"no engine that holds {needed}" if any(engine.ready for engine in self._engines) else "no engine"
        return EngineUnavailable(
            f"{which} is ready ({states}); try again in a few seconds.", retry_after_s=RETRY_AFTER_S
        )

    async def submit(
        self, request: AnyRequest, on_update: OnUpdate | None = None, data: bytes | None = None
    ) -> EngineResult:
        """Generate the images of `request`; `data` is what its payload has beside it.

        Raises: as `RetryingSubmitter.submit`.
        """
        return await self._submitter.submit(request, on_update, data)

    def stop(self) -> None:
        """Fail every request in flight, and all later ones, with EngineUnavailable. Called at the end of a drain."""
        self._submitter.stop()

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
                self._remove_left()
                self.on_change()
            case (message, data):
                if not engine.receive(message, data):
                    return
                if isinstance(message, EngineView):
                    self.on_view(engine.endpoint.name, message, data)
                if isinstance(message, EngineLoad):
                    await engine.ack_load()
                if isinstance(message, EngineState):
                    if engine.ready:
                        self._update_models()
                        outcomes.init_model_series(self._models)
                    self.on_change()
                    async with self._changed:
                        self._changed.notify_all()
                    await self._move_requests()

    def _update_models(self) -> None:
        known = self._known_models()
        known.sort(key=lambda spec: (spec.name != self._default_models.get(spec.kind), not self._is_control(spec)))
        self._models = {}
        for spec in known:
            self._models.setdefault(spec.name, spec)
        new = [spec for spec in known if spec.key not in self._known]
        self._known = {spec.key for spec in known}
        self.on_models(new)

    def _known_models(self) -> list[ModelSpec]:
        """What the engines held when they last reported, and of a group that has none now what its last one held."""
        known = [(engine.endpoint.group, engine.known_models) for engine in self._engines]
        reported = {group for group, models in known if models}
        known += [(group, models) for group, models in self._left_models.items() if group not in reported]
        known.sort(key=lambda item: self._groups.get(item[0], len(self._groups)))
        return [spec for _, models in known for spec in models]

    def _is_control(self, spec: ModelSpec) -> bool:
        """Whether requests that go to no canary go to this version."""
        control = self.versions.control_version(spec.name)
        if control is None:
            return spec.fingerprint not in self.versions.versions_beside(spec.name)
        return spec.fingerprint == control
