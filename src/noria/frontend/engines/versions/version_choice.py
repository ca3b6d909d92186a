"""The version of a model that answers a request, by the routes; and what the requests of a canary and its control did.

The middleware opens a `RequestVersions` for each request, which services get in its `RequestContext`. The first time
that the request needs a model, the choice is made and kept until the request has ended: the same version answers all of
it, also if the routes change meanwhile.
"""

import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Self, TypeVar

import msgspec

from noria.canary.traffic_split import ArmName, TrafficSplit
from noria.canary.windows import WINDOW_S, InFlight, WindowReport
from noria.errors import EngineUnavailable, InvalidField, NoriaError, short_repr
from noria.frontend.engines.versions.canary_counts import ArmCounts, CanaryCounts, Outcome, outcome_of
from noria.protocol.model_spec import ModelKey, ModelSpec
from noria.protocol.routes import Route, Routes, Target
from noria.statistics.values import Values
from noria.statistics.variables import Variable

VERSION_HEADER = "x-noria-version"
_RETRY_AFTER_S = 5.0

SpecT = TypeVar("SpecT", bound=ModelSpec)
KeyT = TypeVar("KeyT")


class Choice(msgspec.Struct, eq=False):
    """The version that answers one request to an endpoint."""

    endpoint: str
    version: str  # ModelSpec.fingerprint
    target: Target | None = None  # None: the model of the configuration
    arm: ArmName = "control"
    canary: int = 0  # the deployment of the canary that it is compared in; 0: none
    window: int = 0  # number of the window of its admission
    is_judged: bool = False  # whether it is counted for the judge; else, of a canary, it is a repeat
    sticky_key: str | None = None  # if the client chose one
    is_open: bool = False  # whether its outcome is still to be counted, once
    outcome: Outcome | None = None  # None: not known yet
    seconds: float = 0.0
    shape: str = ""
    variables: set[str] = msgspec.field(default_factory=set)  # those of which a value was counted for the judge


class RequestVersions:
    """The versions that answer one request, until the end of the context that it manages."""

    __slots__ = ("_choices", "_has_open", "choice", "chooser", "error", "is_answered", "is_sticky", "key", "override")

    def __init__(self, key: str, *, is_sticky: bool = False) -> None:
        """Requests with the same `key` get the same version; `is_sticky`: the client chose it; empty: any will do."""
        self.key, self.is_sticky = key, is_sticky
        self.choice: Choice | None = None  # the last one; None: no model was needed yet
        self._has_open = False  # whether there are choices whose outcomes are to be counted
        self.override: str | None = None  # a tester's choice: an arm or a version
        self.chooser: VersionChooser | None = None
        self.error: NoriaError | None = None  # that the response says
        self.is_answered = False  # whether the response has begun
        self._choices: dict[str, Choice] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.is_answered:
            self.answer()
        if self.chooser is not None:
            for choice in self._choices.values():
                self.chooser.end(choice)

    def answer(self) -> None:
        """Count for the judges what the request did, as its response begins; a stream's outcome counts later."""
        self.is_answered = True
        if self.chooser is None or not self._has_open:
            return
        open_choices = [choice for choice in self._choices.values() if choice.is_open]
        is_recorded = any(choice.outcome not in (None, "ok") for choice in self._choices.values())
        error = None if is_recorded else self.error
        for choice in open_choices:
            is_blamed = choice.outcome == "ok" or choice is self.choice
            self.chooser.answer(choice, error if is_blamed else None)

    def of(self, endpoint: str) -> Choice | None:
        """The choice for an endpoint; None: it was not needed yet."""
        return self._choices.get(endpoint)

    def add(self, choice: Choice) -> None:
        """Keep a choice."""
        self._choices[choice.endpoint] = self.choice = choice
        self._has_open |= choice.is_open

    def record(self, endpoint: str, outcome: Outcome, *, seconds: float, shape: Callable[[], str]) -> None:
        """Note what the model did of the request, if it takes part in a canary; the first time counts.

        Only requests of the same `shape` are compared; without a canary it is not asked for. The request is counted
        when the response begins, since that may be an error yet: of code that runs after the model.
        """
        choice = self._choices.get(endpoint)
        if choice is None or self.chooser is None or choice.outcome is not None:
            return
        choice.outcome, choice.seconds = outcome, seconds
        choice.shape = shape() if choice.is_open else ""
        if self.is_answered:
            self.chooser.answer(choice, None)

    def add_values(self, endpoint: str, variables: Mapping[str, Variable], values: Values) -> None:
        """Count the values of the request for the judges of the canaries that it takes part in.

        Those of a model are for the canary at its own endpoint; those that code of an endpoint records, for any.
        """
        if self.chooser is None:
            return
        own = self._choices.get(endpoint)
        for choice in self._choices.values() if own is None else (own,):
            for name, value in values if choice.is_judged else ():
                if (cell := variables[name].cell(value)) is not None:
                    self.chooser.add_value(choice, name, cell)


class VersionChooser:
    """Chooses versions by the routes, and counts what requests do."""

    def __init__(
        self,
        find: Callable[[str, str], ModelSpec | None],
        clock: Callable[[], float] = time.time,
        find_known: Callable[[str, str], ModelSpec | None] = lambda *_: None,
        set_controls: Callable[[Mapping[str, str], Collection[ModelKey]], None] = lambda *_: None,
    ) -> None:
        """`find` returns the model of this name and fingerprint if a ready engine holds it, `find_known` also if one
        held it before its restart. `set_controls` is as of `EnginePool`, and told of each change.
        """
        self._find, self._find_known, self._clock, self._set_controls = find, find_known, clock, set_controls
        self._routes: dict[str, Route] = {}
        self._targets: dict[tuple[str, str], Target] = {}  # targets of all routes so far, by endpoint and fingerprint
        self.generation = 0
        self._configured: Mapping[str, str] = {}
        self._in_flight: Counter[tuple[str, str]] = Counter()  # by endpoint and fingerprint
        self._open_windows: Counter[int] = Counter()
        self._counts: dict[int, CanaryCounts] = {}  # by the canary's deployment

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
            self._counts[canary] = CanaryCounts()
        self._tell_controls()

    def configure(self, fingerprints: Mapping[str, str]) -> None:
        """Take the models of the configuration, by name, for the controls of endpoints whose route has none."""
        if fingerprints != self._configured:
            self._configured = fingerprints
            self._tell_controls()

    def _tell_controls(self) -> None:
        routes = self._routes.values()
        deployed = {route.endpoint: route.control.fingerprint for route in routes if route.control is not None}
        beside = {
            ModelKey(route.endpoint, version) for route in routes for version in self.versions_beside(route.endpoint)
        }
        self._set_controls({**self._configured, **deployed}, beside)

    def control_version(self, endpoint: str) -> str | None:
        """The fingerprint of an endpoint's control; None: it is not known."""
        route = self._routes.get(endpoint)
        return self._configured.get(endpoint) if route is None or route.control is None else route.control.fingerprint

    def versions_beside(self, endpoint: str) -> set[str]:
        """The fingerprints of the versions beside an endpoint's control: its canary or its shadow."""
        route = self._routes.get(endpoint)
        return set() if route is None else {each.fingerprint for each in (route.canary, route.shadow) if each}

    def shadow_of(self, control: ModelSpec, versions: RequestVersions) -> tuple[Target, float] | None:
        """The shadow of an endpoint and its share, if the request can be copied to it.

        None: the endpoint has none, or it is a tester's request or none that a client waits for; or `control`, which
        answers the request, is the shadow in place of what is to be compared, which no engine holds. A shadow with the
        content of the endpoint's control gets copies, too.
        """
        route = self._routes.get(control.name)
        if route is None or route.shadow is None or versions.override is not None:
            return None
        shadow = route.shadow
        is_replaced = control.fingerprint == shadow.fingerprint != self.control_version(control.name)
        return None if is_replaced else (shadow, route.shadow_share)

    def target_of(self, spec: ModelSpec, versions: RequestVersions | None = None) -> Target | None:
        """The version that a model was deployed as; None: it is the configuration's. `versions` are the request's."""
        if versions is not None and (choice := versions.of(spec.name)) is not None:
            return choice.target
        return self._targets.get((spec.name, spec.fingerprint))

    def version_name(self, spec: ModelSpec, versions: RequestVersions | None) -> str:
        """The version of a model as responses name it: MODEL@NUMBER, or the fingerprint of the configuration's."""
        target = self.target_of(spec, versions)
        return spec.fingerprint if target is None else target.version

    def choose(self, control: SpecT, versions: RequestVersions | None) -> SpecT:
        """Return the version that answers a request to the endpoint whose control is `control`; None: it is no request.

        Raises:
            InvalidField: the request's tester asks for a version that is not served.
            EngineUnavailable: the tester asks for a canary that no engine holds now.
        """
        if versions is None:
            return control
        if (choice := versions.of(control.name)) is None:
            choice = self._choose(control, versions)
            versions.chooser = self
            versions.add(choice)
            self._in_flight[choice.endpoint, choice.version] += 1
            if choice.is_judged:
                self._open_windows[choice.window] += 1
        if choice.version == control.fingerprint:
            return control
        found = self._find(choice.endpoint, choice.version) or self._find_known(choice.endpoint, choice.version)
        return found if isinstance(found, type(control)) else control

    def _choose(self, control: ModelSpec, versions: RequestVersions) -> Choice:
        """`control` is what answers in place of the route's control, too, while no engine holds that."""
        route, window = self._routes.get(control.name), int(self._clock() / WINDOW_S)
        target = None if route is None or route.control is None else route.control
        if target is not None and target.fingerprint != control.fingerprint:
            target = self._targets.get((control.name, control.fingerprint))
        choice = Choice(control.name, control.fingerprint, target, window=window)
        if route is None or route.canary is None:
            if versions.override is not None:
                _check_override(choice, versions.override)
            return choice
        canary = route.canary
        control_name = control.fingerprint if target is None else target.version
        split = TrafficSplit(control_name, canary.version, route.canary_share, f"noria-{canary.deployment}")
        # Not by the request's id, which the client may choose, and with it the canary.
        arm = split.choose(versions.key or secrets.token_hex(16), versions.override)
        if canary.fingerprint != control.fingerprint and self._find(control.name, canary.fingerprint) is None:
            if arm == "canary" and versions.override is not None:
                raise EngineUnavailable(
                    f"no engine holds {canary.version} now; try again in a few seconds.", retry_after_s=_RETRY_AFTER_S
                )
            # The canary's engines are starting again: nothing can be compared. If the control's are, too, requests
            # wait for them, each for its own version.
            is_known = self._find_known(control.name, canary.fingerprint) is not None
            if arm == "canary" and is_known and self._find(control.name, control.fingerprint) is None:
                choice.arm, choice.target, choice.version = "canary", canary, canary.fingerprint
            return choice
        if arm == "canary":
            choice.arm, choice.target, choice.version = "canary", canary, canary.fingerprint
        is_compared = route.control is None or route.control.fingerprint == control.fingerprint
        if versions.override is None and is_compared:
            choice.canary = canary.deployment
            choice.sticky_key = versions.key if versions.is_sticky else None
            choice.is_judged = not versions.is_sticky or self._counts[canary.deployment].claim(versions.key)
            choice.is_open = True
        return choice

    def answer(self, choice: Choice, error: NoriaError | None) -> None:
        """Count a request whose response begins, unless it is a stream whose outcome is not known yet."""
        outcome = choice.outcome
        if error is not None:
            blamed = outcome_of(error, has_deadline=True)  # it may be one
            outcome = outcome if blamed == "none" else blamed
        if outcome is not None:
            self._count(choice, outcome)

    def _count(self, choice: Choice, outcome: Outcome) -> None:
        if not choice.is_open:
            return
        self._close(choice, is_counted=outcome != "none")
        if outcome == "none" or choice.canary not in self._counts:  # it has ended
            return
        if choice.is_judged:
            self._counts_of(choice).count(outcome, choice.seconds, choice.shape)
        else:
            self._counts_of(choice).repeats += 1

    def add_value(self, choice: Choice, variable: str, cell: str) -> None:
        """Count a value for the judge: the first one of a variable, since those of one request are not independent.

        Code of endpoints may record values after the model's part of the request has ended; such a value may come too
        late for the window of the admission, and is then judged with the next one.
        """
        if variable not in choice.variables and choice.canary in self._counts:
            choice.variables.add(variable)
            self._counts_of(choice).add(variable, cell)

    def _counts_of(self, choice: Choice) -> ArmCounts:
        return self._counts[choice.canary].of(choice.window, choice.arm)

    def end(self, choice: Choice) -> None:
        """Forget a request that has ended."""
        _decrement(self._in_flight, (choice.endpoint, choice.version))
        if choice.is_open:
            self._close(choice, is_counted=False)

    def _close(self, choice: Choice, *, is_counted: bool) -> None:
        """Let the window of a request's admission wait for it no longer, and if it counts nothing, let the next count
        for its sticky key.
        """
        if not choice.is_open:
            return
        choice.is_open = False
        if choice.is_judged:
            _decrement(self._open_windows, choice.window)
            if not is_counted and choice.sticky_key is not None:
                choice.is_judged = False
                if choice.canary in self._counts:
                    self._counts[choice.canary].release(choice.sticky_key)

    def in_flight(self) -> tuple[InFlight, ...]:
        """The requests that have not ended, by version."""
        return tuple(InFlight(endpoint, version, count) for (endpoint, version), count in self._in_flight.items())

    def take_ended(self) -> tuple[WindowReport, ...]:
        """Return what the requests that have ended since the last call did, by canary and window."""
        return tuple(report for canary, counts in self._counts.items() for report in counts.take(canary))

    def first_open_window(self) -> int:
        """The first window with requests that have not ended, else the current one."""
        return min(self._open_windows, default=int(self._clock() / WINDOW_S))


def _check_override(choice: Choice, override: str) -> None:
    version = choice.version if choice.target is None else choice.target.version
    if override not in ("control", version):
        raise InvalidField(
            f"{VERSION_HEADER} is {short_repr(override)}; {choice.endpoint} has no canary now, allowed are control and "
            f"{version}.",
            field=VERSION_HEADER,
        )


def _decrement(counter: Counter[KeyT], key: KeyT) -> None:
    counter[key] -= 1
    if not counter[key]:
        del counter[key]
