"""A canary's life in virtual time: simulated requests, the real split into windows, the real judge and ramp.

Requests arrive as a Poisson process of 20 a second, in two shapes. The control rejects 5 % of them, and fails in 0.5 %
of the others; its latency is lognormal with σ = 0.4, its output normal, in cells of equal shares. A canary differs as
its scenario says. The ramp is 5, 25 and 50 %, each for a third of 20,000 requests; its last step waits until the judge
passes, for at most 4,000 more.
"""

import dataclasses
import math
import statistics
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from noria.canary.arm import Arm
from noria.canary.judge import ERRORS, JudgeSettings, JudgeState, step, verdict
from noria.canary.ramp import RampPlan, advance, start_ramp, weight
from noria.canary.traffic_split import key_position

NUM_REQUESTS, NUM_WAITING = 20_000, 4_000
REQUESTS_PER_S = 20.0
PLAN = RampPlan((5.0, 25.0, 50.0, 100.0), NUM_REQUESTS / REQUESTS_PER_S / 3)
SETTINGS = JudgeSettings(guards=("output",))
_NUM_CELLS = 10
_CELL_EDGES = [statistics.NormalDist().inv_cdf(k / _NUM_CELLS) for k in range(1, _NUM_CELLS)]
_WINDOW_REQUESTS, _WINDOW_RESPONSES = 100, 5  # at least: of both arms, of the canary
_REJECTION_RATE, _ERROR_RATE, _LATENCY_SIGMA = 0.05, 0.005, 0.4
_SHAPES_S = {"512x512": 1.0, "1024x1024": 4.0}
_LARGE_SHARE = 0.3
_NUM_KEYS, _FAILING_KEYS = 4_000, 0.01

Array = NDArray[Any]


@dataclasses.dataclass(frozen=True)
class Scenario:
    """How a canary differs from the control, and what disturbs both. The default is an A/A test."""

    name: str
    error_rate: float = _ERROR_RATE
    rejection_rate: float = _REJECTION_RATE
    slowdown: float = 1.0
    shift: float = 0.0  # shift of the output, in standard deviations
    arm_noise: float = 0.0  # σ of the log by which each window slows the canary down by chance
    drift: float = 0.0  # largest amount by which each window raises the rates of errors and rejections of both
    keys: str = ""  # "request": 1 % of 4,000 sticky keys always fail, all requests count; "first": one of each key


class Run(NamedTuple):
    """How a canary ended. Counts of requests are of both arms."""

    end: str  # rolled_back, promoted, or waiting: the judge never passed
    num_canary: int  # responses of the canary until then
    num_beyond: int  # requests from the minimum of canary responses to the end; 0 if it was not reached
    max_e: float
    z_test_fails: bool  # whether a one-sided z-test of the error rates, p < 5 %, alarmed at any window
    trajectory: list[tuple[int, float]]  # canary responses and E after each window


class _Requests:
    """All requests of a run, as arrays; both arms' outcomes of each, of which one comes true."""

    def __init__(self, scenario: Scenario, rng: np.random.Generator) -> None:
        num = NUM_REQUESTS + NUM_WAITING
        window = np.arange(num) // _WINDOW_REQUESTS
        self.at_s = np.cumsum(rng.exponential(1 / REQUESTS_PER_S, num))
        self.position, self.counts = rng.random(num), np.ones(num, bool)
        drift = scenario.drift * rng.random(window[-1] + 1)[window]
        luck = rng.random(num)
        self.rejections = luck < _REJECTION_RATE + drift, luck < scenario.rejection_rate + drift
        luck = rng.random(num)
        self.errors = luck < _ERROR_RATE + drift, luck < scenario.error_rate + drift
        if scenario.keys:
            keys, salt = rng.integers(_NUM_KEYS, size=num), f"run-{rng.integers(2**60)}"
            positions = np.array([key_position(salt, f"user-{key}") / 2**64 for key in range(_NUM_KEYS)])
            self.position = positions[keys]
            failing = (rng.random(_NUM_KEYS) < _FAILING_KEYS)[keys]
            self.errors = failing, failing
            if scenario.keys == "first":
                self.counts = np.zeros(num, bool)
                self.counts[np.unique(keys, return_index=True)[1]] = True
        self.is_large = rng.random(num) < _LARGE_SHARE
        small_s, large_s = _SHAPES_S.values()
        latency_s = np.where(self.is_large, large_s, small_s) * rng.lognormal(0, _LATENCY_SIGMA, num)
        noise = rng.lognormal(0, scenario.arm_noise, window[-1] + 1)[window] if scenario.arm_noise else 1.0
        self.latency_s = latency_s, latency_s * scenario.slowdown * noise
        output = rng.normal(0, 1, num)
        self.cell = np.searchsorted(_CELL_EDGES, output), np.searchsorted(_CELL_EDGES, output + scenario.shift)

    def arm(self, which: int, chosen: Array, start: int, end: int) -> Arm:
        """Return the counts of an arm (0: control) for its chosen requests of a window."""
        num = int(chosen.sum())
        chosen = chosen & ~self.rejections[which][start:end]
        errors, latency_s, cell = (
            values[which][start:end][chosen] for values in (self.errors, self.latency_s, self.cell)
        )
        is_large, num_rejected = self.is_large[start:end][chosen], num - int(chosen.sum())
        latencies = {
            shape: latency_s[mask].tolist() for shape, mask in zip(_SHAPES_S, (~is_large, is_large), strict=True)
        }
        cells = {str(k): count for k, count in enumerate(np.bincount(cell, minlength=_NUM_CELLS).tolist()) if count}
        return Arm(num, int(errors.sum()), latencies, {"output": cells}, num_rejected)


def simulate(scenario: Scenario, seed: int, settings: JudgeSettings = SETTINGS) -> Run:
    """Run one canary to its end."""
    requests = _Requests(scenario, np.random.default_rng(seed))
    state, ramp, start = JudgeState(), start_ramp(PLAN, 0.0), 0
    minimum_at, z_test_fails, max_e = None, False, 0.0
    trajectory = list[tuple[int, float]]()
    while start < len(requests.position) and not ramp.is_final:
        end, is_canary = _next_window(requests, start, weight(PLAN, ramp))
        counts = requests.counts[start:end]
        control, canary = (
            requests.arm(which, chosen & counts, start, end) for which, chosen in enumerate((~is_canary, is_canary))
        )
        state = step(state, control, canary, settings)
        found = verdict(state, settings)
        if minimum_at is None and state.num_canary >= settings.min_responses:
            minimum_at = end
        max_e = max(max_e, found.e)
        trajectory.append((state.num_canary, found.e))
        z_test_fails |= minimum_at is not None and _z_test(state) > 1.645
        for now in requests.at_s[start + _WINDOW_REQUESTS - 1 : end : _WINDOW_REQUESTS].tolist():
            ramp = advance(PLAN, ramp, found.outcome, now)
        start = end
    end_name = ramp.status if ramp.is_final else "waiting"
    beyond = start - minimum_at if minimum_at is not None else 0
    return Run(end_name, state.num_canary, beyond, max_e, z_test_fails, trajectory)


def _next_window(requests: _Requests, start: int, share: float) -> tuple[int, Array]:
    """Return the end of the window that begins at `start`, and which of its requests are the canary's."""
    end, is_canary = start, np.zeros(0, bool)
    while end < len(requests.position) and (is_canary & requests.counts[start:end]).sum() < _WINDOW_RESPONSES:
        end = min(len(requests.position), end + _WINDOW_REQUESTS)
        is_canary = requests.position[start:end] < share
    return end, is_canary


def _z_test(state: JudgeState) -> float:
    """The pooled two-proportion z statistic, which promises its level for one look only."""
    control, canary = state.rates(ERRORS)
    rate = (canary.bad + control.bad) / (canary.n + control.n)
    deviation = math.sqrt(rate * (1 - rate) * (1 / canary.n + 1 / control.n))
    return (canary.share - control.share) / deviation if deviation else 0.0
