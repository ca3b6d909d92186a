"""Which version of a model answers a request, by the routes; and what the requests of a canary and its control did.

The middleware opens a `RequestVersions` for each request. The first time that the request needs a model, the choice is
made and kept until the request has ended: the same version answers all of it, also if the routes change meanwhile.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Self, TypeVar

from noria.canary.judge import Arm
from noria.canary.traffic_split import ArmName, TrafficSplit, key_position
from noria.canary.windows import WINDOW_S, InFlight, WindowReport
from noria.errors import EngineUnavailable, InvalidField, short_repr
from noria.protocol.model_spec import ModelSpec
from noria.protocol.routes import Route, Routes, Target
from noria.statistics.distributions import MAX_CATEGORIES, OTHER
from noria.statistics.values import Values
from noria.statistics.variables import Variable

VERSION_HEADER = "x-noria-version"
_MAX_STICKY_KEYS = 100_000  # of one canary, whose first requests count
_STICKY_SALT = "noria-sticky"
_RETRY_AFTER_S = 5.0

SpecT = TypeVar("SpecT", bound=ModelSpec)
KeyT = TypeVar("KeyT")


@dataclass(slots=True)
class Choice:
    """The version that answers one request to an endpoint."""

    endpoint: str
    version: str  # ModelSpec.fingerprint
    target: Target | None = None  # None: the model of the configuration
    arm: ArmName = "control"
    canary: int = 0  # the deployment of the canary that it is compared in; 0: none
    window: int = 0  # of its admission
    is_judged: bool = False  # whether it is counted for the judge
    is_open: bool = False  # whether its outcome is still to be counted, once
    variables: set[str] = field(default_factory=set)  # of which a value was counted for the judge


class RequestVersions:
    """The versions that answer one request. As a context manager, the current one for all tasks started in it."""

    __slots__ = ("_choices", "_token", "chooser", "is_sticky", "key", "override")

    def __init__(self, key: str, *, is_sticky: bool = False) -> None:
        """Requests with the same `key` get the same version; `is_sticky`: the client chose the key."""
        self.key, self.is_sticky = key, is_sticky
        self.override: str | None = None  # a tester's choice: an arm or a version
        self.chooser: VersionChooser | None = None
        self._choices: dict[str, Choice] = {}

    def __enter__(self) -> Self:
        self._token = _CURRENT.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _CURRENT.reset(self._token)
        if self.chooser is not None:
            for choice in self._choices.values():
                self.chooser.end(choice)

    @property
    def choice(self) -> Choice | None:
        """The last choice; None: no model was needed yet."""
        return next(reversed(self._choices.values()), None)

    @property
    def judged(self) -> list[Choice]:
        """The choices that are counted for judges."""
        return [choice for choice in self._choices.values() if choice.is_judged]

    def of(self, endpoint: str) -> Choice | None:
        """The choice for an endpoint; None: it was not needed yet."""
        return self._choices.get(endpoint)

    def add(self, choice: Choice) -> None:
        """Keep a choice."""
        self._choices[choice.endpoint] = choice


_CURRENT: ContextVar[RequestVersions | None] = ContextVar("noria_request_versions", default=None)


def current_versions() -> RequestVersions | None:
    """Return those of the current request; None: this is none, but for instance a job."""
    return _CURRENT.get()


@dataclass(slots=True)
class _ArmCounts:
    """What the requests of one arm and window did."""

    n: int = 0
    errors: int = 0
    latencies: dict[str, list[float]] = field(default_factory=dict)  # seconds of those without an error, by shape
    cells: dict[str, dict[str, int]] = field(default_factory=dict)  # by variable

    def add(self, variable: str, cell: str) -> None:
        """Count a value."""
        cells = self.cells.setdefault(variable, {})
        if cell not in cells and len(cells) >= MAX_CATEGORIES:
            cell = OTHER
        cells[cell] = cells.get(cell, 0) + 1

    def as_arm(self) -> Arm:
        """As the judge takes it."""
        return Arm(self.n, self.errors, self.latencies, self.cells)


@dataclass(slots=True)
class _CanaryCounts:
    """What the requests of one canary and its control did since the last report."""

    windows: dict[tuple[int, ArmName], _ArmCounts] = field(default_factory=dict)
    keys: set[int] = field(default_factory=set)  # hashes of sticky ones that were counted


class VersionChooser:
    """Chooses versions by the routes, and counts what requests do."""

    def __init__(self, find: Callable[[str, str], ModelSpec | None], clock: Callable[[], float] = time.time) -> None:
        """`find` returns the model of this name and fingerprint if a ready engine holds it."""
        self._find, self._clock = find, clock
        self._routes: dict[str, Route] = {}
        self._targets: dict[tuple[str, str], Target] = {}  # of all routes so far, by endpoint and fingerprint
        self.generation = 0
        self.configured: Mapping[str, str] = {}  # fingerprints of the configuration's models, by name
        self._in_flight: Counter[tuple[str, str]] = Counter()  # by endpoint and fingerprint
        self._open_windows: Counter[int] = Counter()
        self._counts: dict[int, _CanaryCounts] = {}  # by the canary's deployment

    def follow(self, routes: Routes) -> None:
        """Choose by these routes from now on."""
        self._routes, self.generation = {route.endpoint: route for route in routes.routes}, routes.generation
        for route in routes.routes:
            for target in filter(None, (route.shadow, route.canary, route.control)):
                self._targets[route.endpoint, target.fingerprint] = target
        canaries = {route.canary.deployment for route in routes.routes if route.canary is not None}
        for ended in self._counts.keys() - canaries:
            del self._counts[ended]
        for canary in canaries - self._counts.keys():
            self._counts[canary] = _CanaryCounts()

    def control_version(self, endpoint: str) -> str | None:
        """The fingerprint of an endpoint's control; None: it is not known."""
        route = self._routes.get(endpoint)
        return self.configured.get(endpoint) if route is None or route.control is None else route.control.fingerprint

    def versions_beside(self, endpoint: str) -> set[str]:
        """The fingerprints of the versions beside an endpoint's control: its canary or its shadow."""
        route = self._routes.get(endpoint)
        return set() if route is None else {each.fingerprint for each in (route.canary, route.shadow) if each}

    def shadow_of(self, control: ModelSpec) -> tuple[Target, float] | None:
        """The shadow of an endpoint and its share, if the current request can be copied to it.

        None: the endpoint has none, or it is a tester's request or none that a client waits for; or `control`, which
        answers the request, is the shadow itself, since no engine holds what is to be compared.
        """
        route, versions = self._routes.get(control.name), current_versions()
        if route is None or route.shadow is None or versions is None or versions.override is not None:
            return None
        return None if control.fingerprint == route.shadow.fingerprint else (route.shadow, route.shadow_share)

    def target_of(self, spec: ModelSpec) -> Target | None:
        """The version that a model was deployed as; None: it is the configuration's. Also of a job, later."""
        if (versions := current_versions()) is not None and (choice := versions.of(spec.name)) is not None:
            return choice.target
        return self._targets.get((spec.name, spec.fingerprint))

    def version_name(self, spec: ModelSpec) -> str:
        """The version of a model as responses name it: MODEL@NUMBER, or the fingerprint of the configuration's."""
        target = self.target_of(spec)
        return spec.fingerprint if target is None else target.version

    def choose(self, control: SpecT) -> SpecT:
        """Return the version that answers the current request to the endpoint whose control is `control`.

        Raises:
            InvalidField: the request's tester asks for a version that is not served.
            EngineUnavailable: the tester asks for a canary that no engine holds now.

        """
        versions = current_versions()
        if versions is None:
            return control
        if (choice := versions.of(control.name)) is None:
            choice = self._choose(control, versions)
            versions.chooser = self
            versions.add(choice)
            self._in_flight[choice.endpoint, choice.version] += 1
            if choice.is_open:
                self._open_windows[choice.window] += 1
        if choice.version == control.fingerprint:
            return control
        found = self._find(choice.endpoint, choice.version)
        return found if isinstance(found, type(control)) else control

    def _choose(self, control: ModelSpec, versions: RequestVersions) -> Choice:
        """`control` is what answers in place of the route's control, too, while no engine holds that."""
        route, window = self._routes.get(control.name), int(self._clock() / WINDOW_S)
        target = None if route is None or route.control is None else route.control
        if target is not None and target.fingerprint != control.fingerprint:
            target = self._targets.get((control.name, control.fingerprint))
        choice = Choice(control.name, control.fingerprint, target, window=window)
        if route is None or route.canary is None:
            _check_override(choice, versions.override)
            return choice
        canary = route.canary
        control_name = control.fingerprint if target is None else target.version
        split = TrafficSplit(control_name, canary.version, route.canary_share, f"noria-{canary.deployment}")
        arm = split.choose(versions.key, versions.override)
        if canary.fingerprint != control.fingerprint and self._find(control.name, canary.fingerprint) is None:
            if arm == "canary" and versions.override is not None:
                raise EngineUnavailable(
                    f"no engine holds {canary.version} now; try again in a few seconds.", retry_after_s=_RETRY_AFTER_S
                )
            return choice  # the canary's engines are starting again: nothing can be compared
        if arm == "canary":
            choice.arm, choice.target, choice.version = "canary", canary, canary.fingerprint
        is_compared = route.control is None or route.control.fingerprint == control.fingerprint
        if versions.override is None and is_compared:
            choice.canary = canary.deployment
            choice.is_judged = not versions.is_sticky or self._is_first(canary.deployment, versions.key)
            choice.is_open = choice.is_judged
        return choice

    def _is_first(self, canary: int, key: str) -> bool:
        """Return whether this is the first request of a key: only those are independent of each other."""
        keys, position = self._counts[canary].keys, key_position(_STICKY_SALT, key)
        if position in keys:
            return False
        if len(keys) >= _MAX_STICKY_KEYS:  # hours later a user may count once more
            keys.clear()
        keys.add(position)
        return True

    def record(self, endpoint: str, *, ok: bool, seconds: float, shape: str) -> None:
        """Count the outcome of the current request, if it takes part in a canary, once.

        Only equal shapes are compared.
        """
        versions = current_versions()
        choice = None if versions is None else versions.of(endpoint)
        if choice is None or not choice.is_open:
            return
        self._close(choice)
        if choice.canary not in self._counts:  # it has ended
            return
        counts = self._counts_of(choice)
        counts.n += 1
        if ok:
            counts.latencies.setdefault(shape, []).append(seconds)
        else:
            counts.errors += 1

    def add_value(self, choice: Choice, variable: str, cell: str) -> None:
        """Count a value for the judge: the first one of a variable, since those of one request are not independent.

        Code of endpoints may record values after the model's part of the request has ended; such a value may come too
        late for the window of the admission, and is then judged with the next one.
        """
        if variable not in choice.variables and choice.canary in self._counts:
            choice.variables.add(variable)
            self._counts_of(choice).add(variable, cell)

    def _counts_of(self, choice: Choice) -> _ArmCounts:
        return self._counts[choice.canary].windows.setdefault((choice.window, choice.arm), _ArmCounts())

    def end(self, choice: Choice) -> None:
        """Forget a request that has ended."""
        _decrement(self._in_flight, (choice.endpoint, choice.version))
        self._close(choice)

    def _close(self, choice: Choice) -> None:
        """Let the window of a request's admission wait for it no longer."""
        if choice.is_open:
            choice.is_open = False
            _decrement(self._open_windows, choice.window)

    def in_flight(self) -> tuple[InFlight, ...]:
        """The requests that have not ended, by version."""
        return tuple(InFlight(endpoint, version, count) for (endpoint, version), count in self._in_flight.items())

    def take_ended(self) -> tuple[WindowReport, ...]:
        """What the requests that have ended since the last call did, by canary and window."""
        reports = []
        for canary, counts in self._counts.items():
            taken, counts.windows = counts.windows, {}
            for window in {window for window, _ in taken}:
                control, its_canary = (taken.get((window, arm), _ArmCounts()).as_arm() for arm in ("control", "canary"))
                reports.append(WindowReport(canary, window, control, its_canary))
        return tuple(reports)

    def first_open_window(self) -> int:
        """The first window with requests that have not ended, else the current one."""
        return min(self._open_windows, default=int(self._clock() / WINDOW_S))


def add_canary_values(endpoint: str, variables: Mapping[str, Variable], values: Values) -> None:
    """Count the values of the current request for the judges of the canaries that it takes part in.

    Those of a model are for the canary at its own endpoint; those that code of an endpoint records, for any.
    """
    versions = current_versions()
    if versions is None or versions.chooser is None or not (judged := versions.judged):
        return
    if versions.of(endpoint) is not None:
        judged = [choice for choice in judged if choice.endpoint == endpoint]
    for choice in judged:
        for name, value in values:
            if (cell := variables[name].cell(value)) is not None:
                versions.chooser.add_value(choice, name, cell)


def _check_override(choice: Choice, override: str | None) -> None:
    version = choice.version if choice.target is None else choice.target.version
    if override not in (None, "control", version):
        raise InvalidField(
            f"{VERSION_HEADER} is {short_repr(override)}; {choice.endpoint} has no canary now, allowed are control and "
            f"{version}.",
            field=VERSION_HEADER,
        )


def _decrement(counter: Counter[KeyT], key: KeyT) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
