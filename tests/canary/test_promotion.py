"""A canary from its first window to its end: windows, judge and ramp together, with simulated arms."""

import random
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from noria.canary.arm import Arm
from noria.canary.judge import JudgeSettings, JudgeState, step, verdict
from noria.canary.ramp import RampPlan, advance, start_ramp, weight
from noria.canary.windows import WINDOW_S, CanaryWindows, WindowReport

PLAN = RampPlan((5.0, 25.0, 50.0, 100.0), 30.0)
SETTINGS = JudgeSettings()
NUM_WINDOWS = 150


@dataclass
class SimulatedArm:
    """Rejects and fails so often, as evenly as counts allow, and takes so long."""

    rejection_rate: float
    error_rate: float
    slowdown: float = 1.0
    num: int = 0
    rejections: int = 0
    errors: int = 0

    def serve(self, num: int, rng: random.Random) -> Arm:
        """Return what `num` more requests did."""
        self.num += num
        rejections = round(self.rejection_rate * self.num) - self.rejections
        self.rejections += rejections
        errors = min(num - rejections, round(self.error_rate * (self.num - self.rejections)) - self.errors)
        self.errors += errors
        seconds = [self.slowdown * rng.lognormvariate(0, 0.1) for _ in range(num - rejections - errors)]
        return Arm(num, errors, {"64": seconds} if seconds else {}, rejections=rejections)


def end_of(control: SimulatedArm, canary: SimulatedArm, num_requests: int, rng: random.Random) -> str:
    """Return the status of the canary's ramp after `NUM_WINDOWS` windows, or when it has ended."""
    windows, state, ramp = CanaryWindows(), JudgeState(), start_ramp(PLAN, 0.0)
    for window in range(NUM_WINDOWS):
        share = weight(PLAN, ramp)
        num_canary = sum(rng.random() < share for _ in range(num_requests))
        arms = control.serve(num_requests - num_canary, rng), canary.serve(num_canary, rng)
        windows.add(WindowReport(1, window, *arms))
        for both in windows.take(window + 1):
            state = step(state, *both, SETTINGS)
        ramp = advance(PLAN, ramp, verdict(state, SETTINGS).outcome, window * WINDOW_S)
        if ramp.is_final:
            break
    return ramp.status


RATES = st.floats(0.0, 0.3)
MORE = st.floats(0.04, 0.65)  # 3 points are the bound; counts of few requests are round
SEEDS = st.integers(0, 10**6).map(random.Random)


@st.composite
def controls_and_worse_canaries(draw: st.DrawFn) -> tuple[SimulatedArm, SimulatedArm]:
    """A canary that is beyond the bound in some respects, and better or the same in the others."""
    control = SimulatedArm(draw(RATES), draw(RATES))
    worse = draw(st.sets(st.sampled_from(["rejections", "errors", "latency"]), min_size=1))
    rejection_rate, error_rate = (
        rate + draw(MORE) if what in worse else draw(st.floats(0.0, rate))
        for what, rate in (("rejections", control.rejection_rate), ("errors", control.error_rate))
    )
    slowdown = draw(st.floats(1.3, 5.0) if "latency" in worse else st.floats(0.5, 1.0))
    return control, SimulatedArm(rejection_rate, error_rate, slowdown)


@settings(max_examples=40, deadline=None)
@given(controls_and_worse_canaries(), st.integers(10, 60), SEEDS)
def test_no_canary_is_promoted_that_rejects_fails_or_is_slow_beyond_the_bound(
    arms: tuple[SimulatedArm, SimulatedArm], num_requests: int, rng: random.Random
) -> None:
    assert end_of(*arms, num_requests, rng) != "promoted"


@settings(max_examples=20, deadline=None)
@given(RATES, st.floats(0.15, 0.65), SEEDS)
def test_a_canary_that_rejects_far_more_than_the_control_is_rolled_back(
    rate: float, more: float, rng: random.Random
) -> None:
    assert end_of(SimulatedArm(rate, 0.0), SimulatedArm(rate + more, 0.0), 60, rng) == "rolled_back"


@settings(max_examples=20, deadline=None)
@given(st.floats(0.0, 0.02), st.floats(0.0, 0.02), SEEDS)
def test_a_canary_that_rejects_and_fails_as_often_as_the_control_is_promoted(
    rejection_rate: float, error_rate: float, rng: random.Random
) -> None:
    control, canary = (SimulatedArm(rejection_rate, error_rate) for _ in range(2))
    assert end_of(control, canary, 60, rng) == "promoted"
