"""Judges a canary against the control, window by window: pass, fail or inconclusive.

A *window* is the requests of both arms that were admitted in one span of time. `step` takes it when all of them have
ended (else slow ones are missing), with five or more of the canary; `verdict` reads the evidence so far. The windows
must be closed by times and counts, never by outcomes.

Guards: the rate of errors, the rate of rejections, the latency, and any histograms or categories of outputs. Each has
an e-process, so a canary that is no worse fails with a probability of at most `alpha`, however often one looks
(`e_processes.py`). The assumption is that a window's outcomes are independent given the version. So of requests with a
sticky key only the first of each key counts; the others are *repeats*. A level that moves from window to window, alike
in both arms, does no harm. Windows that slow down one arm at random do none to the latency, which bets once a window.

The state is immutable, bounded and JSON (`msgspec.json`): it is stored as the evidence.
"""

import bisect
import math
import re
from collections.abc import Mapping, Sequence
from typing import Literal

from msgspec import Struct

from noria.canary.arm import Arm
from noria.canary.e_processes import bet, log_mean_exp, rate_interval, two_sample_log_factor
from noria.canary.rates import INCREASES, Rate, increase_interval, step_rate
from noria.errors import short_repr
from noria.statistics.distributions import MAX_CATEGORIES, OTHER, add_counts, most_frequent
from noria.statistics.drift import MIN_SAMPLES, corrected_psi

ERRORS, REJECTIONS, LATENCY = "errors", "rejections", "latency"
GUARD_PATTERN = r"^[a-zA-Z_][a-zA-Z0-9_]{0,63}\Z"  # matches the names of variables
MAX_GUARDS = 16

_STAKES = (0.1, 0.2, 0.35, 0.5, 0.7, 0.95)  # that the latency's e-process averages over
_PASSING_STAKES = tuple(-stake for stake in _STAKES)
_SHRINKAGE = 30.0  # counts of the control that the estimate of the canary's distribution begins with
_MAX_LOG_E = 690.0  # exp of it is a float
_MAX_NUM_TO_PASS = 10**9

Outcome = Literal["pass", "fail", "inconclusive"]


class JudgeSettings(Struct, frozen=True):
    """The limits of a canary, and how sure the judge must be. Fixed for a canary's life."""

    guards: tuple[str, ...] = ()  # names of histograms and categories; others in an `Arm` are ignored
    judges_latency: bool = True
    alpha: float = 0.05  # probability that a canary that is no worse ever fails
    min_responses: int = 80  # responses of the canary, before it can fail
    hard_stop_responses: int = 10  # after so many it fails at `hard_stop_e`
    hard_stop_e: float = 1000.0
    min_error_increase: float = 0.005  # a smaller one never fails
    max_error_increase: float = 0.03  # a pass excludes a larger one
    max_rejection_increase: float = 0.03  # a smaller one never fails, a pass excludes a larger one; at 1 none fails
    latency_tolerance: float = 1.2  # canary over control; slower ones are "slower"
    max_psi: float = 0.1  # corrected; a guard with a smaller one never fails

    def __post_init__(self) -> None:
        """Raises ValueError: a value is not allowed."""
        _require(0 < self.alpha < 1, "alpha", self.alpha, "above 0 and below 1")
        _require(self.min_responses >= 1, "min_responses", self.min_responses, "1 or more")
        _require(self.hard_stop_responses >= 1, "hard_stop_responses", self.hard_stop_responses, "1 or more")
        _require(self.hard_stop_e >= 1 / self.alpha, "hard_stop_e", self.hard_stop_e, f"{1 / self.alpha:g} or more")
        _require(0 <= self.min_error_increase < 1, "min_error_increase", self.min_error_increase, "0 to below 1")
        _require(0 < self.max_error_increase <= 1, "max_error_increase", self.max_error_increase, "above 0 to 1")
        _require(
            0 < self.max_rejection_increase <= 1, "max_rejection_increase", self.max_rejection_increase, "above 0 to 1"
        )
        _require(1 <= self.latency_tolerance < math.inf, "latency_tolerance", self.latency_tolerance, "1 or more")
        _require(0 <= self.max_psi < math.inf, "max_psi", self.max_psi, "0 or more")
        if reserved := {ERRORS, REJECTIONS, LATENCY}.intersection(self.guards):
            raise ValueError(f"guards are {short_repr(self.guards)}; {', '.join(sorted(reserved))} has its own guard")
        if len(set(self.guards)) < len(self.guards) or len(self.guards) > MAX_GUARDS:
            raise ValueError(f"guards are {short_repr(self.guards)}; allowed are at most {MAX_GUARDS}, each once")
        for guard in self.guards:
            if not re.match(GUARD_PATTERN, guard):
                raise ValueError(f"{short_repr(guard)} is no name of a variable, such as image_brightness")


def _require(holds: bool, name: str, value: float, allowed: str) -> None:
    if not holds:
        raise ValueError(f"{name} is {value!r}; allowed is {allowed}")


class CellEvidence(Struct, frozen=True):
    """The evidence of one histogram or of one variable's categories."""

    control: dict[str, int] = {}
    canary: dict[str, int] = {}
    log_e: float = 0.0


class JudgeState(Struct, frozen=True):
    """The evidence so far; the default has none. Logarithms are natural."""

    num_windows: int = 0  # that were not empty
    num_control: int = 0  # responses, rejections among them
    control_errors: int = 0
    num_canary: int = 0
    canary_errors: int = 0
    errors_log_e: tuple[float, ...] = (0.0,) * len(INCREASES)  # log e of each increase
    slower_log_e: tuple[float, ...] = (0.0,) * len(_STAKES)  # log e of each stake, against "not slower"
    not_slower_log_e: tuple[float, ...] = (0.0,) * len(_STAKES)  # log e of each stake, against "slower"
    num_pairs: int = 0  # pairs of latencies
    num_slower: int = 0  # pairs whose canary was slower than the tolerance
    num_invalid: int = 0  # latencies that were left out: not finite, or negative
    guards: dict[str, CellEvidence] = {}
    control_rejections: int = 0
    canary_rejections: int = 0
    rejections_log_e: tuple[float, ...] = (0.0,) * len(INCREASES)  # log e of each increase
    control_repeats: int = 0
    canary_repeats: int = 0
    waiting_control: int = 0  # responses in windows that are not complete, so no evidence yet
    waiting_canary: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError if the state was stored by a version with other alternatives."""
        lengths = tuple(map(len, (self.errors_log_e, self.rejections_log_e, self.slower_log_e, self.not_slower_log_e)))
        if lengths != (len(INCREASES), len(INCREASES), len(_STAKES), len(_STAKES)):
            raise ValueError("the evidence is of another version of the judge; start the canary again")

    @property
    def num_seen(self) -> int:
        """The responses of the canary, with those that are not judged yet."""
        return self.num_canary + self.waiting_canary

    def rates(self, guard: str) -> tuple[Rate, Rate]:
        """Return the errors or the rejections of the control and of the canary."""
        if guard == REJECTIONS:
            return Rate(self.control_rejections, self.num_control), Rate(self.canary_rejections, self.num_canary)
        num_control, num_canary = self.num_control - self.control_rejections, self.num_canary - self.canary_rejections
        return Rate(self.control_errors, num_control), Rate(self.canary_errors, num_canary)


class GuardResult(Struct, frozen=True):
    """The result of one guard. The canary is worse with the evidence `e` if `effect` is above `floor`."""

    e: float
    effect: float  # increase of the rate, share of pairs that are slower, corrected PSI
    floor: float

    @property
    def counted_e(self) -> float:
        """`e`, or 0 while the effect is within the floor."""
        return self.e if self.effect > self.floor else 0.0


class Verdict(Struct, frozen=True):
    """The judge's opinion, with what it rests on."""

    outcome: Outcome
    e: float  # the mean of the guards' counted e
    e_by_guard: dict[str, GuardResult]
    interval: tuple[float, float]  # bounds of the increase of the error rate, at level 1 − alpha, valid at every look
    reason: str


def step(state: JudgeState, control: Arm, canary: Arm, settings: JudgeSettings) -> JudgeState:
    """Return the state after one more window. An empty one changes nothing; one arm alone is no evidence."""
    if not control.n + control.repeats and not canary.n + canary.repeats:
        return state
    guards = {
        guard: _step_cells(
            state.guards.get(guard, CellEvidence()), control.cells.get(guard, {}), canary.cells.get(guard, {})
        )
        for guard in settings.guards
    }
    num_pairs, num_slower, num_invalid = _compare_latencies(control, canary, settings.latency_tolerance)
    payoff = 2 * num_slower / num_pairs - 1 if num_pairs else 0.0
    return JudgeState(
        num_windows=state.num_windows + 1,
        num_control=state.num_control + control.n,
        control_errors=state.control_errors + control.errors,
        num_canary=state.num_canary + canary.n,
        canary_errors=state.canary_errors + canary.errors,
        errors_log_e=step_rate(
            state.errors_log_e,
            state.rates(ERRORS)[0],
            Rate(control.errors, control.n - control.rejections),
            Rate(canary.errors, canary.n - canary.rejections),
        ),
        slower_log_e=bet(state.slower_log_e, _STAKES, payoff),
        not_slower_log_e=bet(state.not_slower_log_e, _PASSING_STAKES, payoff),
        num_pairs=state.num_pairs + num_pairs,
        num_slower=state.num_slower + num_slower,
        num_invalid=state.num_invalid + num_invalid,
        guards=guards,
        control_rejections=state.control_rejections + control.rejections,
        canary_rejections=state.canary_rejections + canary.rejections,
        rejections_log_e=step_rate(
            state.rejections_log_e,
            state.rates(REJECTIONS)[0],
            Rate(control.rejections, control.n),
            Rate(canary.rejections, canary.n),
        ),
        control_repeats=state.control_repeats + control.repeats,
        canary_repeats=state.canary_repeats + canary.repeats,
    )


def _step_cells(evidence: CellEvidence, control: Mapping[str, int], canary: Mapping[str, int]) -> CellEvidence:
    """Add a window's counts, and its factor against "the same distribution".

    The cells are those of earlier windows; all others together are one, so an unseen category is one, too. The
    control's shares are estimated with half a count in each cell (Krichevsky and Trofimov, 1981), the canary's likewise
    with 30 more counts that are spread as the control's: without evidence of its own it is like the control.
    """
    known = [name for name in add_counts(evidence.control, evidence.canary) if name != OTHER]
    in_control, in_canary, new_control, new_canary = (
        [*(counts.get(name, 0) for name in known), sum(counts.values()) - sum(counts.get(name, 0) for name in known)]
        for counts in (evidence.control, evidence.canary, control, canary)
    )
    num_cells, total_control, total_canary = len(known) + 1, sum(in_control), sum(in_canary)
    p_control = [(count + 0.5) / (total_control + num_cells / 2) for count in in_control]
    p_canary = [
        (count + 0.5 + _SHRINKAGE * p) / (total_canary + num_cells / 2 + _SHRINKAGE)
        for count, p in zip(in_canary, p_control, strict=True)
    ]
    log_factor = two_sample_log_factor(new_canary, new_control, p_canary, p_control)
    names = _known_names(known, control, canary)
    return CellEvidence(
        _add_to(evidence.control, control, names), _add_to(evidence.canary, canary, names), evidence.log_e + log_factor
    )


def _known_names(known: Sequence[str], *windows: Mapping[str, int]) -> set[str]:
    """`known` and the window's most frequent new cells, up to the limit."""
    counts = add_counts(*windows)
    new = most_frequent({name: count for name, count in counts.items() if name not in {*known, OTHER}})
    return {*known, *new[: MAX_CATEGORIES - len(known)]}


def _add_to(total: dict[str, int], counts: Mapping[str, int], names: set[str]) -> dict[str, int]:
    named = {name: count for name, count in counts.items() if name in names}
    rest = sum(counts.values()) - sum(named.values())
    return add_counts(total, named, {OTHER: rest} if rest else {})


def _compare_latencies(control: Arm, canary: Arm, tolerance: float) -> tuple[int, int, int]:
    """Return the numbers of disjoint pairs of one shape, of those whose canary is slower, and of invalid values."""
    mine, theirs = (
        {shape: [value for value in values if 0 <= value < math.inf] for shape, values in arm.latencies.items()}
        for arm in (canary, control)
    )
    num_values = sum(len(values) for arm in (control, canary) for values in arm.latencies.values())
    num_valid = sum(len(values) for arm in (mine, theirs) for values in arm.values())
    num_pairs = num_slower = 0
    for shape in mine.keys() & theirs.keys():
        num = min(len(mine[shape]), len(theirs[shape]))
        pairs = zip(_spread(mine[shape], num), _spread(theirs[shape], num), strict=True)
        num_pairs += num
        num_slower += sum(value > tolerance * other for value, other in pairs)
    return num_pairs, num_slower, num_values - num_valid


def _spread(values: Sequence[float], num: int) -> list[float]:
    """`num` of the values, evenly spread over the window."""
    return [values[k * len(values) // num] for k in range(num)]


def verdict(state: JudgeState, settings: JudgeSettings) -> Verdict:
    """Judge the evidence so far.

    Fail: the mean of the guards' e-processes reaches 1/alpha; before `min_responses`, `hard_stop_e`. Pass: the
    intervals exclude increases of the rates by `max_error_increase` and `max_rejection_increase`, the bet that the
    canary is not slower reaches 1/alpha, and each user guard has 200 values of each arm and a corrected PSI of at most
    `max_psi`. Passing by a rate assumes that each arm's rate is the same in all windows.
    """
    results = _guard_results(state, settings)
    e = sum(result.counted_e for result in results.values()) / len(results)
    interval = increase_interval(*state.rates(ERRORS), settings.alpha)
    limit = 1 / settings.alpha if state.num_canary >= settings.min_responses else settings.hard_stop_e
    if e >= limit and state.num_canary >= min(settings.hard_stop_responses, settings.min_responses):
        worst = max(results, key=lambda guard: results[guard].counted_e)
        reason = f"{_describe(worst, state, settings)}; the evidence against it is {e:.3g}, and fails from {limit:g}"
        return Verdict("fail", e, results, interval, reason)
    if missing := _missing(state, settings, results, interval):
        return Verdict("inconclusive", e, results, interval, "; ".join(missing))
    return Verdict("pass", e, results, interval, f"no guard is worse after {state.num_canary} responses of the canary")


def _guard_results(state: JudgeState, settings: JudgeSettings) -> dict[str, GuardResult]:
    results = {}
    for guard, logs, floor in (
        (ERRORS, state.errors_log_e, settings.min_error_increase),
        (REJECTIONS, state.rejections_log_e, settings.max_rejection_increase),
    ):
        control, canary = state.rates(guard)
        results[guard] = GuardResult(_e(logs), canary.share - control.share, floor)
    if settings.judges_latency:
        share = state.num_slower / state.num_pairs if state.num_pairs else 0.0
        results[LATENCY] = GuardResult(_e(state.slower_log_e), share, 0.5)
    for guard in settings.guards:
        evidence = state.guards.get(guard, CellEvidence())
        psi = corrected_psi(evidence.control, evidence.canary)
        results[guard] = GuardResult(_e((evidence.log_e,)), psi, settings.max_psi)
    return results


def _e(logs: Sequence[float]) -> float:
    return math.exp(min(log_mean_exp(logs), _MAX_LOG_E))


def _describe(guard: str, state: JudgeState, settings: JudgeSettings) -> str:
    if guard in (ERRORS, REJECTIONS):
        control, canary = state.rates(guard)
        return (
            f"{guard}: {canary.bad} of {canary.n} responses of the canary, {control.bad} of {control.n} of the control"
        )
    if guard == LATENCY:
        return (
            f"latency: the canary took over {settings.latency_tolerance:g} times as long in {state.num_slower} of "
            f"{state.num_pairs} pairs"
        )
    evidence = state.guards[guard]
    return f"{guard}: another distribution, corrected PSI {corrected_psi(evidence.control, evidence.canary):.2f}"


def describe_counts(state: JudgeState) -> str:
    """Return what both arms did, in words."""
    waiting = state.waiting_canary + state.waiting_control
    return (
        f"responses of the canary {state.num_canary}, errors {state.canary_errors}, rejections "
        f"{state.canary_rejections}; of the control {state.num_control}, errors {state.control_errors}, rejections "
        f"{state.control_rejections}"
        + (f"; not judged yet, five at a time: {state.waiting_canary} and {state.waiting_control}" if waiting else "")
    )


def _missing(
    state: JudgeState, settings: JudgeSettings, results: Mapping[str, GuardResult], interval: tuple[float, float]
) -> list[str]:
    """Return what a pass still needs, in words."""
    missing = []
    if state.num_canary < settings.min_responses:
        missing.append(f"{state.num_canary} of {settings.min_responses} responses of the canary")
    rejections = increase_interval(*state.rates(REJECTIONS), settings.alpha)
    for guard, high, allowed in (
        (ERRORS, interval[1], settings.max_error_increase),
        (REJECTIONS, rejections[1], settings.max_rejection_increase),
    ):
        if high >= allowed and state.num_canary:
            missing.append(f"{guard}: at most {100 * high:.1f} points more are possible, {100 * allowed:g} are allowed")
    if settings.judges_latency and (e := _e(state.not_slower_log_e)) < 1 / settings.alpha:
        passes_from = f"and passes from {1 / settings.alpha:g}"
        missing.append(f"latency: the evidence that the canary is not slower is {e:.3g}, {passes_from}")
    for guard in settings.guards:
        evidence = state.guards.get(guard, CellEvidence())
        if (num := min(sum(evidence.control.values()), sum(evidence.canary.values()))) < MIN_SAMPLES:
            missing.append(f"{guard}: {num} of {MIN_SAMPLES} values")
        elif results[guard].effect > settings.max_psi:
            missing.append(
                f"{guard}: the corrected PSI is {results[guard].effect:.2f}, {settings.max_psi:g} is allowed"
            )
    if missing and (few := _few_users(state, settings)):
        missing.insert(0, few)
    return missing


def _few_users(state: JudgeState, settings: JudgeSettings) -> str:
    """Say how many users there are and are needed; empty if most responses are first ones, or without sticky keys."""
    if state.control_repeats + state.canary_repeats <= state.num_control + state.num_canary:
        return ""
    return (
        f"too few users: {state.num_canary} of the canary and {state.num_control} of the control, whose first "
        f"responses count (the key is sticky), and {state.canary_repeats + state.control_repeats} later ones do not; "
        f"{settings.min_responses} users of the canary are needed to roll back, {num_to_pass(settings)} or more to "
        "pass"
    )


def num_to_pass(settings: JudgeSettings) -> int:
    """Return the fewest responses of a canary that a pass needs: none is an error or rejected."""
    allowed = min(settings.max_error_increase, settings.max_rejection_increase)
    return bisect.bisect_left(
        range(_MAX_NUM_TO_PASS), True, lo=settings.min_responses,
        key=lambda num: rate_interval(0, num, settings.alpha / 2)[1] < allowed,
    )  # fmt: skip
