"""A shadow: a version that gets copies of requests, whose answers are compared with the control's and discarded.

The plan is written `20%`, `20% for 10m` or `20% for 500`: the share of the requests that are copied, and how long, or
for how many compared answers; without an end it goes on until somebody ends it.
"""

import re

from msgspec import Struct

from noria.canary.ramp import MAX_GAP_S, MAX_STEP_S, MIN_STEP_S, UNITS_S
from noria.errors import short_repr

MAX_CHARS = 50
MAX_LOST = 2  # engines that end with a copy in flight, before the shadow is ended: a copy must not cost others theirs
_PLAN = re.compile(r"(?P<percent>[0-9.]+)\s*%?(\s+for\s+(?P<number>[0-9.]+)\s*(?P<unit>[smhd]?))?")
_FORM = "a shadow is per cents, and perhaps an end, such as '20%', '20% for 10m' or '20% for 500' (answers)"
_FIRST_PROGRESS_S = 30.0


class ShadowPlan(Struct, frozen=True):
    """The share of the requests that is copied, and until when. Raises ValueError if that is not allowed."""

    percent: float
    max_s: float | None = None
    max_answers: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.percent <= 100:
            raise ValueError(f"{self.percent:g} %; a shadow gets copies of above 0 and at most 100 % of the requests")
        if self.max_s is not None and not MIN_STEP_S <= self.max_s <= MAX_STEP_S:
            raise ValueError(f"for {self.max_s:g} s; allowed are {MIN_STEP_S:g} s to {MAX_STEP_S:g} s (30 days)")
        if self.max_answers is not None and not 1 <= self.max_answers <= 10**9:
            raise ValueError(f"for {self.max_answers} answers; allowed are 1 to {10**9}")

    def __str__(self) -> str:
        end = "" if self.max_answers is None else f" for {self.max_answers} answers"
        return f"{self.percent:g} %{end}" if self.max_s is None else f"{self.percent:g} % for {self.max_s:g} s"


def parse_shadow(text: str) -> ShadowPlan:
    """Return the plan of `20% for 10m`. Raises ValueError."""
    match = _PLAN.fullmatch(text.strip()) if len(text) <= MAX_CHARS else None
    try:
        if match is None:
            raise ValueError
        percent, number = float(match["percent"]), float(match["number"] or 0)
    except ValueError:
        raise ValueError(f"{short_repr(text)}; {_FORM}") from None
    if match["number"] is None:
        return ShadowPlan(percent)
    if match["unit"]:
        return ShadowPlan(percent, max_s=number * UNITS_S[match["unit"]])
    if not number.is_integer():
        raise ValueError(f"{short_repr(text)}; {_FORM}")
    return ShadowPlan(percent, max_answers=int(number))


class ShadowCounts(Struct, frozen=True):
    """The outcome of copies of requests, beside the requests themselves; sums, so that they can be added."""

    num_answers: int = 0  # answers of the shadow, errors included
    num_errors: int = 0
    num_control_errors: int = 0  # errors of the control at the same requests
    num_lost: int = 0  # copies whose engine ended; errors, too
    num_dropped: int = 0  # copies that were never computed
    num_timed: int = 0  # requests that both answered
    shadow_s: float = 0.0  # computing time of those, without the wait in queues
    control_s: float = 0.0
    num_distances: int = 0  # answers of the same form
    distance: float = 0.0  # distances of their outputs, summed
    max_distance: float = 0.0  # the largest, no sum

    def __add__(self, other: "ShadowCounts") -> "ShadowCounts":
        sums = {name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__}
        sums["max_distance"] = max(self.max_distance, other.max_distance)
        return ShadowCounts(**sums)


class ShadowReport(Struct, frozen=True):
    """The counts of one front end since its last report."""

    deployment: int
    counts: ShadowCounts


class ShadowState(Struct, frozen=True):
    """The state of a shadow, as far as it is known."""

    counts: ShadowCounts = ShadowCounts()
    elapsed_s: float = 0.0  # since its first copy was possible, without outages of who counts it
    updated_at: float = 0.0  # Unix time, s


def advance(state: ShadowState, counts: ShadowCounts, now: float) -> ShadowState:
    """Return the state at `now`, with more counts."""
    passed_s = min(max(0.0, now - state.updated_at), MAX_GAP_S)
    return ShadowState(state.counts + counts, state.elapsed_s + passed_s, now)


class ShadowEnd(Struct, frozen=True):
    """The end of a shadow."""

    has_passed: bool  # whether it may get requests, if its deployment has a plan for that
    reason: str


def end_of(plan: ShadowPlan, state: ShadowState, max_error_increase: float) -> ShadowEnd | None:
    """Return whether a shadow is over; None: it goes on. `max_error_increase` is of its share of errors, 0 to 1."""
    counts = state.counts
    if counts.num_lost >= MAX_LOST:
        reason = f"engines ended {counts.num_lost} times with a copy of a request in flight; {describe(counts)}"
        return ShadowEnd(False, reason)
    is_over = plan.max_answers is not None and counts.num_answers >= plan.max_answers
    if is_over or (plan.max_s is not None and state.elapsed_s >= plan.max_s):
        reason = f"it was wanted for {str(plan).partition(' for ')[2]}; {describe(counts)}"
        if counts.num_errors - counts.num_control_errors > max_error_increase * counts.num_answers:
            return ShadowEnd(False, f"{reason}; these are too many errors for requests")
        return ShadowEnd(True, reason)
    return None


def is_progress(before: ShadowState, after: ShadowState) -> bool:
    """Whether a state is worth an event: answers or time doubled."""
    return after.counts.num_answers >= max(
        1, 2 * before.counts.num_answers
    ) or after.elapsed_s >= max(_FIRST_PROGRESS_S, 2 * before.elapsed_s)  # fmt: skip


def describe(counts: ShadowCounts) -> str:
    """Return the comparison in words."""
    if not counts.num_answers:
        return f"no copy was answered yet, {counts.num_dropped} were dropped"
    parts = [
        f"{counts.num_answers} copies answered, {counts.num_dropped} dropped",
        f"errors {counts.num_errors}, of the control {counts.num_control_errors}",
    ]
    if counts.num_timed and counts.control_s:
        parts.append(f"computing time {counts.shadow_s / counts.control_s:.2f} times the control's")
    if counts.num_distances:
        mean = counts.distance / counts.num_distances
        parts.append(f"distance of outputs {mean:.3g} on average, {counts.max_distance:.3g} at most")
    return "; ".join(parts)
