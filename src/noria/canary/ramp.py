"""How a canary's share grows: the plan, as `5,25,50,100 every 10m`, and where it stands.

| status | becomes |
|---|---|
| ramping | ramping in the next step, when its time is over; waiting, when the next step is 100 % |
| waiting | promoted, when the judge passes |
| holding | promoted or rolled back by hand |
| any of these | paused while the registry is away; rolled_back when the judge fails |

A step lasts at least its time, also when the judge is sure before. Steps go on while the judge is inconclusive; only
the last one, to 100 %, waits until it passes, because no control is left after it. A plan that ends below 100 % stays
`holding` there until somebody promotes it. `promoted` and `rolled_back` are final.
"""

import itertools
import re
from typing import Literal

import msgspec
from msgspec import Struct

from noria.canary.judge import Outcome
from noria.errors import short_repr

MAX_STEPS = 20
MAX_RAMP_CHARS = 200
MIN_STEP_S, MAX_STEP_S = 10.0, 30 * 86400.0
MAX_GAP_S = 10.0
"""Time between two calls of `advance` that counts at most: what is longer was an outage of who calls it."""

UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_RAMP = re.compile(r"(?P<percents>[0-9.,%\s]+?)(\s+every\s+(?P<number>[0-9]+(\.[0-9]+)?)\s*(?P<unit>[smhd]))?")
_FORM = "a ramp is per cents and a time, such as '5,25,50,100 every 10m'; units are s, m, h and d"

RampStatus = Literal["ramping", "waiting", "holding", "paused", "promoted", "rolled_back"]


class RampPlan(Struct, frozen=True):
    """The canary's per cents, step by step. Raises ValueError if they are not allowed."""

    percents: tuple[float, ...]  # ascending, above 0; 100 is the promotion
    step_s: float = 600.0

    def __post_init__(self) -> None:
        got = ",".join(f"{percent:g}" for percent in self.percents)
        if not 1 <= len(self.percents) <= MAX_STEPS:
            raise ValueError(f"{len(self.percents)} steps; a ramp has 1 to {MAX_STEPS}")
        if not all(0 < percent <= 100 for percent in self.percents):
            raise ValueError(f"{short_repr(got)}; the per cents of a ramp are above 0 and at most 100")
        if any(a >= b for a, b in itertools.pairwise(self.percents)):
            raise ValueError(f"{short_repr(got)}; each step of a ramp is above the one before")
        if not MIN_STEP_S <= self.step_s <= MAX_STEP_S:
            raise ValueError(
                f"a step of {self.step_s:g} s; a step lasts {MIN_STEP_S:g} s to {MAX_STEP_S:g} s (30 days)"
            )


def parse_ramp(text: str) -> RampPlan:
    """Return the plan of `5,25,50,100 every 10m`; without `every`, 10 minutes. Raises ValueError."""
    match = _RAMP.fullmatch(text.strip()) if len(text) <= MAX_RAMP_CHARS else None
    if match is None:
        raise ValueError(f"{short_repr(text)}; {_FORM}")
    try:
        percents = tuple(float(part.strip().removesuffix("%")) for part in match["percents"].split(","))
    except ValueError:
        raise ValueError(f"{short_repr(text)}; {_FORM}") from None
    if match["number"] is None:
        return RampPlan(percents)
    return RampPlan(percents, float(match["number"]) * UNITS_S[match["unit"]])


class RampState(Struct, frozen=True):
    """Where a ramp stands."""

    status: RampStatus
    step: int  # index in `RampPlan.percents`, from 0
    elapsed_s: float  # in this step, without pauses
    updated_at: float  # seconds, of the clock that `advance` is given

    @property
    def is_final(self) -> bool:
        """Whether nothing more will change."""
        return self.status in {"promoted", "rolled_back"}


def start_ramp(plan: RampPlan, now: float) -> RampState:
    """Return the state of a canary that has just got its first share."""
    return _enter_step(plan, 0, now)


def advance(
    plan: RampPlan, state: RampState, outcome: Outcome, now: float, *, registry_answers: bool = True
) -> RampState:
    """Return the state at `now`, with the judge's latest outcome. To be called every few seconds.

    Time counts while the registry answers. Steps of the clock, back or forth, count as at most `MAX_GAP_S`.
    """
    if state.is_final:
        return state
    if outcome == "fail":  # also while the registry is away
        return msgspec.structs.replace(state, status="rolled_back", updated_at=now)
    if not registry_answers:
        return msgspec.structs.replace(state, status="paused", updated_at=now)
    elapsed_s = state.elapsed_s + min(max(0.0, now - state.updated_at), MAX_GAP_S)
    last = len(plan.percents) - 1
    if state.step == last:
        return RampState("holding", last, elapsed_s, now)
    if elapsed_s < plan.step_s:
        return RampState("ramping", state.step, elapsed_s, now)
    if plan.percents[state.step + 1] == 100 and outcome != "pass":
        return RampState("waiting", state.step, elapsed_s, now)
    return _enter_step(plan, state.step + 1, now)


def promote(plan: RampPlan, state: RampState, now: float) -> RampState:
    """Return the state after somebody promoted the canary; a final state stays."""
    return state if state.is_final else RampState("promoted", len(plan.percents) - 1, 0.0, now)


def roll_back(state: RampState, now: float) -> RampState:
    """Return the state after somebody rolled the canary back; a final state stays."""
    return state if state.is_final else msgspec.structs.replace(state, status="rolled_back", updated_at=now)


def weight(plan: RampPlan, state: RampState) -> float:
    """Return the canary's share of the traffic, 0 to 1."""
    match state.status:
        case "promoted":
            return 1.0
        case "rolled_back":
            return 0.0
        case _:
            return plan.percents[state.step] / 100


def _enter_step(plan: RampPlan, step: int, now: float) -> RampState:
    if plan.percents[step] == 100:
        return RampState("promoted", step, 0.0, now)
    return RampState("holding" if step == len(plan.percents) - 1 else "ramping", step, 0.0, now)
