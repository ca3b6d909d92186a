"""The front end's connections to the engines, and what they hold, as they last reported.

`load_reports.py` says how busy they are, `router.py` chooses among the ready engines that hold a request's model,
`retries.py` submits the request. An invalid reply fails only its own request. This module knows no HTTP and no
deployments, and does not read pixels.
"""

import asyncio
import contextlib
import functools
import logging
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import ParamSpec, Self, TypeVar

from noria.errors import EngineUnavailable
from noria.frontend.engines.client import EngineClient, EngineStatus
from noria.frontend.engines.load_reports import LoadReports
from noria.frontend.engines.rebalancing import rebalance
from noria.frontend.engines.retries import RETRY_AFTER_S, RetryingSubmitter
from noria.frontend.engines.router import route
from noria.observe.metrics import outcomes
from noria.protocol.kinds import AnyModelSpec
from noria.protocol.messages import EngineState, EngineView, Ping, ViewRequest
from noria.protocol.model_spec import ModelKey, ModelSpec
from noria.protocol.tasks import engine_name
from noria.protocol.transport import Connected, ConnectionEvent, Disconnected, EngineConnection, EngineEndpoint

SpecT = TypeVar("SpecT", bound=ModelSpec)

log = logging.getLogger("noria.frontend")

_UPKEEP_INTERVAL_S = 1.0


Arguments = ParamSpec("Arguments")


def _notify(listeners: Iterable[Callable[Arguments, None]], *args: Arguments.args, **kwargs: Arguments.kwargs) -> None:
    for listener in listeners:
        listener(*args, **kwargs)


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
        self.reports = LoadReports(self._engines)
        self._upkeep: asyncio.Task[None] | None = None
        self._groups: dict[str, int] = {}  # their order
        self._left_models: dict[str, tuple[ModelSpec, ...]] = {}  # models of the last engine that left, by its group
        self._changed = asyncio.Condition()
        self._telling: set[asyncio.Task[None]] = set()
        self.submitter = RetryingSubmitter(
            self.route, self._restarts, self.unavailable_error, self._changed, restart_wait_s
        )
        self._on_demand: dict[str, AnyModelSpec] = {}  # models that are known whether or not an engine holds them
        self._models: dict[str, ModelSpec] = {}
        self._models_of: dict[type[ModelSpec], Mapping[str, ModelSpec]] = {}  # by kind, as far as they were needed
        self._known: set[ModelKey] = set()
        self._default_models = default_models or {}
        self._controls: Mapping[str, str] = {}
        self._beside: Collection[ModelKey] = ()
        # Called in the event loop, must not block: with the models that became known; at each change of an engine's
        # state; with the name, view and thumbnails of an engine.
        self.on_models: list[Callable[[Iterable[ModelSpec]], None]] = []
        self.on_change: list[Callable[[], None]] = []
        self.on_view: list[Callable[[str, EngineView, memoryview | None], None]] = []

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
        if self._upkeep is not None:
            self._upkeep.cancel()
            await asyncio.gather(self._upkeep, return_exceptions=True)
        for engine in self._engines:
            engine.handle_disconnect()
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
        _notify(self.on_change)

    def _add(self, endpoint: EngineEndpoint) -> None:
        connection = EngineConnection(endpoint.address, endpoint.secret_key)
        engine = EngineClient(connection, self._name, endpoint)
        self._engines.append(engine)
        connection.listen(functools.partial(self._on_event, engine))

    def _remove_left(self) -> None:
        """Forget the engines that leave and have nothing more to do."""
        for engine in [each for each in self._engines if each.is_leaving]:
            if engine.is_connected and engine.num_results_in_flight:
                continue
            self._engines.remove(engine)
            if engine.known_models:
                self._left_models[engine.endpoint.group] = engine.known_models
            engine.remove()

    async def _keep_up(self) -> None:
        """Renew the leases at engines on other machines, forget the engines that have left, and move requests."""
        while True:
            await asyncio.sleep(_UPKEEP_INTERVAL_S)
            for engine in list(self._engines):
                if engine.endpoint.is_remote:
                    engine.tell(Ping())
            self._remove_left()
            self._move_requests()
            if self._rebalance:
                rebalance(self._engines, asyncio.get_running_loop().time())

    def _move_requests(self) -> None:
        """Move the requests of engines that leave, or release their model, to engines that hold it."""
        for engine in list(self._engines):
            engine.release(lambda request: self.route(request.model, request.model_version) is not None)

    @property
    def ready(self) -> bool:
        """Whether of each kind of model that is served an engine is ready for a request."""
        kinds = {spec.kind for engine in self._engines for spec in engine.models}
        return bool(kinds) and kinds >= self._default_models.keys()

    @property
    def models(self) -> Mapping[str, ModelSpec]:
        """The models served, by name, the default ones first, as the engines last reported them; empty until then.

        Of several versions of a model it is the control.
        """
        return self._models

    def set_controls(self, controls: Mapping[str, str], beside: Collection[ModelKey]) -> None:
        """Have `models` name these versions, the fingerprints of `controls` by name; else rather none of `beside`."""
        self._controls, self._beside = controls, beside
        self._update_models()
        _notify(self.on_change)

    def add_on_demand(self, spec: AnyModelSpec) -> None:
        """Have `models` name a model that engines hold only when requests need it, in this version from now on."""
        if self._on_demand.get(spec.name) != spec:
            self._on_demand[spec.name] = spec
            self._update_models()
            _notify(self.on_change)

    def can_mount(self, spec: AnyModelSpec) -> bool:
        """Whether a ready engine has models of this kind."""
        return any(each.kind == spec.kind for engine in self._engines for each in engine.models)

    async def mount(self, spec: AnyModelSpec, max_loaded: int) -> str:
        """Have all ready engines of its kind hold a checkpoint, of `max_loaded` at most.

        Returns, as soon as one holds it, an empty string, else why none does. Cancelling this call cancels the loads
        that have not begun.
        """
        ready = [engine for engine in self._engines if any(each.kind == spec.kind for each in engine.models)]
        error = "no engine is ready"
        mounts = [asyncio.create_task(engine.mount(spec, max_loaded)) for engine in ready]
        try:
            for mounting in asyncio.as_completed(mounts):
                if not (error := await mounting):
                    break
        except asyncio.CancelledError:
            for each in mounts:
                each.cancel()
            raise
        return error

    def models_of(self, spec_type: type[SpecT]) -> Mapping[str, SpecT]:
        """The models of one kind among `models`."""
        if spec_type not in self._models_of:
            self._models_of[spec_type] = {
                name: spec for name, spec in self._models.items() if isinstance(spec, spec_type)
            }
        return self._models_of[spec_type]  # type: ignore[return-value]

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
        return not self._models or bool(self.models_of(spec_type)) or spec_type.kind in self.kinds

    def find_model(self, name: str, version: str) -> ModelSpec | None:
        """The model in this version, if any engine held it when it last reported."""
        return next((spec for spec in self._known_models() if spec.matches(name, version)), None)

    def find_ready(self, name: str, version: str) -> ModelSpec | None:
        """The model in this version, if a ready engine holds it."""
        held = (spec for engine in self._engines for spec in engine.models)
        return next((spec for spec in held if spec.matches(name, version)), None)

    def ready_models(self, spec_type: type[ModelSpec] = ModelSpec) -> set[ModelKey]:
        """Name and version of each model, by default of any kind, that a ready engine holds."""
        return {spec.key for engine in self._engines for spec in engine.models if isinstance(spec, spec_type)}

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

    def request_view(self, name: str, message: ViewRequest) -> None:
        """Ask engine `name` for a view of its running batch, if it is ready. The view goes to `on_view`."""
        for engine in self._engines:
            if engine.endpoint.name == name and engine.ready:
                engine.tell(message)

    def unavailable_error(self, needed: str) -> EngineUnavailable:
        """Return a request's error while no engine that holds `needed` is ready; `needed` is part of its message."""
        states = ", ".join(
            f"engine {number} has ended and is restarting" if engine.is_restarting else f"engine {number} is {state}"
            for number, engine in enumerate(self._engines)
            for state in [engine.status().state]
        )
        which = f"no engine that holds {needed}" if any(engine.ready for engine in self._engines) else "no engine"
        return EngineUnavailable(
            f"{which} is ready ({states}); try again in a few seconds.", retry_after_s=RETRY_AFTER_S
        )

    def route(self, model: str, version: str) -> EngineClient | None:
        """The engine that gets a request for this version of the model; None: no ready one holds it."""
        return route(self._engines, model, version)

    def _restarts(self, model: str, version: str) -> bool:
        """Whether an engine that held this version of the model is restarting."""
        known = (spec for engine in self._engines if engine.is_restarting for spec in engine.known_models)
        return any(spec.matches(model, version) for spec in known)

    def _on_event(self, engine: EngineClient, event: ConnectionEvent) -> None:
        try:
            self._handle_event(engine, event)
        except Exception:  # a bug in the front end or the engine; /readyz shows the engine as unknown
            log.exception("the connection to an engine failed")
            engine.handle_disconnect()

    def _handle_event(self, engine: EngineClient, event: ConnectionEvent) -> None:
        match event:
            case Connected():
                engine.send_hello()
            case Disconnected(unsent):
                engine.handle_disconnect(unsent)
                self._remove_left()
                _notify(self.on_change)
            case (message, data):
                if not engine.receive(message, data):
                    return
                if isinstance(message, EngineView):
                    _notify(self.on_view, engine.endpoint.name, message, data)
                if isinstance(message, EngineState):
                    if engine.ready:
                        self._update_models()
                        outcomes.init_model_series(self._models)
                    _notify(self.on_change)
                    telling = asyncio.create_task(self._tell_waiting())
                    self._telling.add(telling)
                    telling.add_done_callback(self._telling.discard)
                    self._move_requests()

    async def _tell_waiting(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def _update_models(self) -> None:
        known = self._known_models()
        known.sort(key=lambda spec: (spec.name != self._default_models.get(spec.kind), not self._is_control(spec)))
        self._models, self._models_of = {}, {}
        for spec in known:
            self._models.setdefault(spec.name, spec)
        new = [spec for spec in known if spec.key not in self._known]
        self._known = {spec.key for spec in known}
        _notify(self.on_models, new)

    def _known_models(self) -> list[ModelSpec]:
        """Return the models that the engines last reported, and for a group without any, those of its last engine."""
        known = [(engine.endpoint.group, engine.known_models) for engine in self._engines]
        reported = {group for group, models in known if models}
        known += [(group, models) for group, models in self._left_models.items() if group not in reported]
        known.sort(key=lambda item: self._groups.get(item[0], len(self._groups)))
        found = [spec for _, models in known for spec in models]
        held = {spec.key for spec in found}
        return [*found, *(spec for spec in self._on_demand.values() if spec.key not in held)]

    def _is_control(self, spec: ModelSpec) -> bool:
        """Whether requests that go to no canary go to this version."""
        control = self._controls.get(spec.name)
        return spec.key not in self._beside if control is None else spec.fingerprint == control
