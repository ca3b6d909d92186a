"""Runs the worlds that a command names, and searches for the number of devices that a p99 needs."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec
import numpy as np

from noria.protocol.model_spec import ModelKey
from noria.scheduling.cluster.autoscaler import AutoscalerSettings, BacklogAutoscaler
from noria.scheduling.costs import CostModel
from noria.scheduling.types import BatchKey
from noria_bench.simulator import fast
from noria_bench.simulator.outcome import Outcome
from noria_bench.simulator.workload import Arrival, Shape, SimulateError, make_arrivals
from noria_bench.simulator.world import Settings, simulate

MAX_DEVICES = 100_000
# The exact engine simulates about 1,000 requests a second.
_MAX_EXACT_REQUESTS = 50_000
# What fits the memory: 300 bytes a request in the exact engine, 20 in the fast one.
_LIMITS = {"exact": 2_000_000, "fast": 100_000_000}


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests: of a process, or of a trace."""

    kind: str = "poisson"  # or diurnal, bursty, trace
    rate: float = 1.0  # mean, in requests a second
    duration_s: float = 600.0
    shapes: tuple[Shape, ...] = (Shape(),)
    seed: int = 0
    trace: tuple[Arrival, ...] = ()

    @property
    def num_expected(self) -> float:
        """About how many requests there are."""
        return len(self.trace) if self.kind == "trace" else self.rate * self.duration_s

    @property
    def description(self) -> str:
        """A sentence that describes the arriving requests."""
        if self.kind == "trace":
            return f"A trace of {len(self.trace):,} requests in {self.trace[-1].at_s:,.0f} s."
        total = sum(shape.share for shape in self.shapes)
        kinds = ", or ".join(
            f"{shape.text} ({100 * shape.share / total:.3g} %)" if len(self.shapes) > 1 else shape.text
            for shape in self.shapes[:4]
        )
        if len(self.shapes) > 4:
            kinds += f", or {len(self.shapes) - 4} other kinds"
        rate = f"{self.rate:g} a second on average for {self.duration_s:,.0f} s"
        return f"{self.kind.capitalize()} arrivals, {rate}; requests of {kinds}."

    def arrivals(self) -> Sequence[Arrival]:
        """Return all requests."""
        if self.kind == "trace":
            return self.trace
        return list(make_arrivals(self.kind, self.rate, list(self.shapes), self.duration_s, self.seed))


@dataclass(frozen=True, slots=True)
class Scenario:
    """A world to simulate, and its name in the report."""

    name: str
    settings: Settings
    price_per_hour: float
    autoscale: AutoscalerSettings | None = None


@dataclass(slots=True)
class Result:
    """The outcome of a scenario."""

    scenario: Scenario
    engine: str
    outcome: Outcome
    num_devices: int
    tried: dict[int, float] = field(default_factory=dict)  # the share within the target, by devices

    @property
    def devices(self) -> dict[str, float]:
        """How many there were; if their number changed, on average and at most."""
        if self.scenario.autoscale is None:
            return {"devices": self.num_devices}
        return {"devices": round(self.outcome.mean_devices, 1), "max_devices": self.outcome.max_devices}


def choose_engine(wanted: str, scenario: Scenario, traffic: Traffic) -> str:
    """Return `exact` or `fast`; raises SimulateError if the wanted engine cannot simulate the scenario."""
    reason = _why_not_fast(scenario, traffic)
    if wanted == "fast" and reason:
        raise SimulateError(f"the fast engine knows {reason}; use --engine exact")
    engine = wanted
    if wanted == "auto":
        engine = "exact" if reason or traffic.num_expected <= _MAX_EXACT_REQUESTS else "fast"
    if traffic.num_expected > _LIMITS[engine]:
        note = f" (the fast one knows {reason})" if reason else ""
        raise SimulateError(
            f"about {traffic.num_expected:,.0f} requests are more than the {_LIMITS[engine]:,} of the {engine} engine"
            f"{note}; lower --rate or --duration"
        )
    return engine


def _why_not_fast(scenario: Scenario, traffic: Traffic) -> str:
    settings = scenario.settings
    if scenario.autoscale is not None or settings.canary_share:
        return "no autoscaler and no canary"
    if np.isfinite(settings.mean_time_to_failure_s) or np.isfinite(settings.mean_time_to_interruption_s):
        return "no failures and no interruptions"
    if traffic.kind in ("bursty", "trace"):
        return "only Poisson and diurnal arrivals"
    if settings.device.decode_batch != fast.DECODE_BATCH:
        return f"decodes of at most {fast.DECODE_BATCH} images"
    if settings.policy == "shortest-first":
        return "only the policies fair, least-slack and fcfs"
    if any(shape.deadline_s is not None or shape.priority != "normal" or shape.images != 1 for shape in traffic.shapes):
        return "one image a request, no deadlines and no priorities"
    return ""


class Study:
    """Runs scenarios on the same traffic. Requests of the first twentieth are a warm-up and are not counted."""

    def __init__(self, traffic: Traffic, engine: str = "auto") -> None:
        self._traffic, self._engine = traffic, engine
        self._arrivals: Sequence[Arrival] | None = None
        self._times_s: np.ndarray | None = None

    def run(self, scenario: Scenario, target_p99_s: float | None = None) -> Result:
        """Simulate a scenario; with a target, with the fewest devices that serve 99 % of the requests within it."""
        engine = choose_engine(self._engine, scenario, self._traffic)
        if target_p99_s is None:
            outcome = self._simulate(scenario, engine, scenario.settings.num_devices)
            return Result(scenario, engine, outcome, scenario.settings.num_devices)
        _check_target(scenario.settings.device.costs(), self._traffic.shapes, target_p99_s)
        outcomes: dict[int, Outcome] = {}
        tried: dict[int, float] = {}

        def meets(num_devices: int) -> bool:
            outcome = outcomes[num_devices] = self._simulate(scenario, engine, num_devices)
            within = int(np.sum(np.asarray(outcome.latencies_s) <= target_p99_s))
            tried[num_devices] = within / max(outcome.num_requests, 1)
            return tried[num_devices] >= 0.99

        num_devices = fewest(meets, _fewest_possible(scenario, self._traffic))
        return Result(scenario, engine, outcomes[num_devices], num_devices, tried)

    def _simulate(self, scenario: Scenario, engine: str, num_devices: int) -> Outcome:
        traffic, settings = self._traffic, replace(scenario.settings, num_devices=num_devices)
        start_s = 0.05 * (traffic.trace[-1].at_s if traffic.trace else traffic.duration_s)
        if engine == "fast":
            if self._times_s is None:
                self._times_s = fast.arrival_times(traffic.kind, traffic.rate, traffic.duration_s, traffic.seed)
                _check_any(len(self._times_s))
            return fast.simulate_fast(
                settings.device, num_devices, self._times_s, traffic.shapes, queue_limit=settings.queue_limit,
                num_choices=settings.num_choices, seed=settings.seed, start_s=start_s,
            )  # fmt: skip
        if self._arrivals is None:
            self._arrivals = traffic.arrivals()
            _check_any(len(self._arrivals))
        if scenario.autoscale is not None:
            settings = replace(settings, autoscaler=BacklogAutoscaler(scenario.autoscale))
        return simulate(settings, self._arrivals, start_s=start_s)


def _check_any(num_requests: int) -> None:
    if not num_requests:
        raise SimulateError("no request arrives; raise --rate or --duration")


def _check_target(costs: CostModel, shapes: Sequence[Shape], target_p99_s: float) -> None:
    """Raise SimulateError if more than 1 % of the requests take longer than the target even alone on a device."""
    too_long = []
    for shape in shapes:
        key = BatchKey(shape.width_px, shape.height_px)
        alone_s = costs.text_encode_s(ModelKey()) + shape.steps * costs.step_s(key, shape.rows) + costs.decode_s(key)
        if alone_s > target_p99_s:
            too_long.append((shape.share, alone_s, shape.text))
    if sum(share for share, *_ in too_long) > 0.01 * sum(shape.share for shape in shapes):
        _, alone_s, text = max(too_long)
        raise SimulateError(f"--p99 is {target_p99_s:g} s, and {text} alone on a device takes {alone_s:.3g} s")


def fewest(meets: Callable[[int], bool], first: int) -> int:
    """Return the smallest number from `first` on that `meets`, which larger numbers do, too.

    Raises SimulateError if none up to MAX_DEVICES does.
    """
    low, high = first - 1, first
    while not meets(high):
        if high >= MAX_DEVICES:
            raise SimulateError(f"even {MAX_DEVICES} devices do not meet the target: a request alone takes longer")
        low, high = high, min(max(high + 1, math.ceil(1.25 * high)), MAX_DEVICES)
        if high > 64 * first:  # more devices do not help
            raise SimulateError(f"even {low} devices do not meet the target: a request alone takes about as long")
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if meets(middle) else (middle, high)
    return high


def _fewest_possible(scenario: Scenario, traffic: Traffic) -> int:
    """Return the devices that are busy all the time with half of the traffic's work in full batches."""
    costs, device = scenario.settings.device.costs(), scenario.settings.device
    shapes = traffic.shapes
    total = sum(shape.share for shape in shapes)
    work_s = 0.0
    for shape in shapes:
        key = BatchKey(shape.width_px, shape.height_px)
        batch = max(min(costs.rows_limit(key) // shape.rows, device.slots), 1)
        work_s += shape.share / total * shape.images * shape.steps * costs.step_s(key, batch * shape.rows) / batch
    rate = traffic.rate if not traffic.trace else len(traffic.trace) / max(traffic.trace[-1].at_s, 1e-9)
    return max(min(int(0.5 * rate * work_s), math.ceil(traffic.num_expected)), 1)


def scenarios(
    base: Scenario, policies: Sequence[str], slots: Sequence[int], fair_width_slacks: Sequence[float] = ()
) -> list[Scenario]:
    """Return the scenario with each policy, each number of slots and, of the policy `fair`, each width slack."""
    found = []
    for policy, num_slots in itertools.product(policies, slots):
        device = msgspec.structs.replace(base.settings.device, slots=num_slots)
        settings = replace(base.settings, policy=policy, device=device)
        named = {f"{policy}, {num_slots} slots": settings}
        if policy == "fair" and fair_width_slacks:
            named = {
                f"fair {slack:g}, {num_slots} slots": replace(settings, fair_width_slack=slack)
                for slack in fair_width_slacks
            }
        found += [replace(base, name=name, settings=each) for name, each in named.items()]
    return found
