"""Judges a canary against the control, window by window: pass, fail or inconclusive.

A *window* is the requests of both arms that were admitted in one span of time. `step` takes it when all of them have
ended (else slow ones are missing), with five or more of the canary; `verdict` reads the evidence so far. The windows
must be closed by times and counts, never by outcomes.

Guards: the error rate, the latency, and any histograms or categories of outputs. Each has an e-process, so a canary
that is no worse fails with a probability of at most `alpha`, however often one looks (`e_processes.py`). The assumption
is that a window's outcomes are independent given the version. So of requests with a sticky key only the first of each
key counts, and requests rejected for the caller's mistake (4xx) or cancelled do not. A level that moves from window to
window, alike in both arms, does no harm. Windows that slow down one arm at random do none to the latency, which bets
once a window.

The state is immutable, bounded and JSON (`msgspec.json`): it is stored as the evidence.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from noria.canary.e_processes import bet, log_mean_exp, rate_interval, two_sample_log_factor
from noria.errors import short_repr
from noria.statistics.distributions import MAX_CATEGORIES, OTHER, add_counts
from noria.statistics.drift import MIN_SAMPLES, corrected_psi

ERRORS, LATENCY = "errors", "latency"
GUARD_PATTERN = r"^[a-zA-Z_][a-zA-Z0-9_]{0,63}\Z"  # of the names of variables
MAX_GUARDS = 16

_ERROR_INCREASES = (0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 0.9)  # that the errors' e-process averages over
_PRIOR_ERRORS, _PRIOR_REQUESTS = 0.5, 50.0  # the guess of the control's error rate before the first window: 1 %
_MAX_ERROR_RATE = 0.99  # of the alternatives, so that a success is possible under each
_STAKES = (0.1, 0.2, 0.35, 0.5, 0.7, 0.95)  # that the latency's e-process averages over
_PASSING_STAKES = tuple(-stake for stake in _STAKES)
_SHRINKAGE = 30.0  # counts of the control that the estimate of the canary's distribution begins with
_MAX_LOG_E = 690.0  # exp of it is a float

Outcome = Literal["pass", "fail", "inconclusive"]


class Arm(Struct, frozen=True):
    """What one arm did in one window. The default is an empty one. Raises ValueError if counts are impossible."""

    n: int = 0  # requests
    errors: int = 0  # of them
    latencies: dict[str, list[float]] = {}  # by shape (only equal shapes are compared); seconds, or any unit
    cells: dict[str, dict[str, int]] = {}  # of each user guard: counts by cell, as `distributions.py` returns them

    def __post_init__(self) -> None:
        if not 0 <= self.errors <= self.n:
            raise ValueError(f"{self.errors} errors of {self.n} requests; errors are 0 to the number of requests")
        for guard, counts in self.cells.items():
            if counts and min(counts.values()) < 0:
                raise ValueError(f"guard {short_repr(guard)} has {short_repr(counts)}; counts are 0 or more")

    def merge(self, other: "Arm") -> "Arm":
        """Return both together: the same window of another process, or the next window."""
        latencies = {shape: list(values) for shape, values in self.latencies.items()}
        for shape, values in other.latencies.items():
            latencies.setdefault(shape, []).extend(values)
        cells = {
            guard: add_counts(self.cells.get(guard, {}), other.cells.get(guard, {}))
            for guard in [*self.cells, *(guard for guard in other.cells if guard not in self.cells)]
        }
        return Arm(self.n + other.n, self.errors + other.errors, latencies, cells)


class JudgeSettings(Struct, frozen=True):
    """What a canary may do, and how sure the judge must be. Fixed for a canary's life."""

    guards: tuple[str, ...] = ()  # names of histograms and categories; others in an `Arm` are ignored
    judges_latency: bool = True
    alpha: float = 0.05  # probability that a canary that is no worse ever fails
    min_responses: int = 80  # of the canary, before it can fail
    hard_stop_responses: int = 10  # after so many it fails at `hard_stop_e`
    hard_stop_e: float = 1000.0
    min_error_increase: float = 0.005  # a smaller one never fails
    max_error_increase: float = 0.03  # a pass excludes a larger one
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
        _require(1 <= self.latency_tolerance < math.inf, "latency_tolerance", self.latency_tolerance, "1 or more")
        _require(0 <= self.max_psi < math.inf, "max_psi", self.max_psi, "0 or more")
        if reserved := {ERRORS, LATENCY}.intersection(self.guards):
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
    """What is known of one histogram or of one variable's categories."""

    control: dict[str, int] = {}
    canary: dict[str, int] = {}
    log_e: float = 0.0


class JudgeState(Struct, frozen=True):
    """The evidence so far; the default has none. Logarithms are natural."""

    num_windows: int = 0  # that were not empty
    num_control: int = 0
    control_errors: int = 0
    num_canary: int = 0
    canary_errors: int = 0
    errors_log_e: tuple[float, ...] = (0.0,) * len(_ERROR_INCREASES)  # of each increase
    slower_log_e: tuple[float, ...] = (0.0,) * len(_STAKES)  # of each stake, against "not slower"
    not_slower_log_e: tuple[float, ...] = (0.0,) * len(_STAKES)  # of each stake, against "slower"
    num_pairs: int = 0  # of latencies
    num_slower: int = 0  # pairs whose canary was slower than the tolerance
    num_invalid: int = 0  # latencies that were left out: not finite, or negative
    guards: dict[str, CellEvidence] = {}

    def __post_init__(self) -> None:
        """Raises ValueError if the state was stored by a version with other alternatives."""
        lengths = len(self.errors_log_e), len(self.slower_log_e), len(self.not_slower_log_e)
        if lengths != (len(_ERROR_INCREASES), len(_STAKES), len(_STAKES)):
            raise ValueError("the evidence is of another version of the judge; start the canary again")


class GuardResult(Struct, frozen=True):
    """What one guard says. The canary is worse with the evidence `e` if `effect` is above `floor`."""

    e: float
    effect: float  # increase of the error rate, share of pairs that are slower, corrected PSI
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
    interval: tuple[float, float]  # of the increase of the error rate, at level 1 − alpha, valid at every look
    reason: str


def step(state: JudgeState, control: Arm, canary: Arm, settings: JudgeSettings) -> JudgeState:
    """Return the state after one more window. An empty one changes nothing; one arm alone is no evidence."""
    if not control.n and not canary.n:
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
        errors_log_e=_step_errors(state, control, canary),
        slower_log_e=bet(state.slower_log_e, _STAKES, payoff),
        not_slower_log_e=bet(state.not_slower_log_e, _PASSING_STAKES, payoff),
        num_pairs=state.num_pairs + num_pairs,
        num_slower=state.num_slower + num_slower,
        num_invalid=state.num_invalid + num_invalid,
        guards=guards,
    )


def _step_errors(state: JudgeState, control: Arm, canary: Arm) -> tuple[float, ...]:
    """Add the window's factor against "equal error rates", for each increase over the control's rate so far."""
    rate = (state.control_errors + _PRIOR_ERRORS) / (state.num_control + _PRIOR_REQUESTS)
    in_canary, in_control = ((arm.errors, arm.n - arm.errors) for arm in (canary, control))
    logs = []
    for log, increase in zip(state.errors_log_e, _ERROR_INCREASES, strict=True):
        higher = max(rate, min(rate + increase, _MAX_ERROR_RATE))
        logs.append(log + two_sample_log_factor(in_canary, in_control, (higher, 1 - higher), (rate, 1 - rate)))
    return tuple(logs)


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
    new = sorted(counts.keys() - {*known, OTHER}, key=lambda name: (-counts[name], name))
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

    Fail: the mean of the guards' e-processes reaches 1/alpha; before `min_responses`, `hard_stop_e`. Pass: the interval
    excludes an increase of the error rate by `max_error_increase`, the bet that the canary is not slower reaches
    1/alpha, and each user guard has 200 values of each arm and a corrected PSI of at most `max_psi`. Passing by the
    error rate assumes that each arm's rate is the same in all windows.
    """
    results = _guard_results(state, settings)
    e = sum(result.counted_e for result in results.values()) / len(results)
    control = rate_interval(state.control_errors, state.num_control, settings.alpha / 2)
    canary = rate_interval(state.canary_errors, state.num_canary, settings.alpha / 2)
    interval = canary[0] - control[1], canary[1] - control[0]
    limit = 1 / settings.alpha if state.num_canary >= settings.min_responses else settings.hard_stop_e
    if e >= limit and state.num_canary >= min(settings.hard_stop_responses, settings.min_responses):
        worst = max(results, key=lambda guard: results[guard].counted_e)
        reason = f"{_describe(worst, state, settings)}; E = {e:.3g}, which fails from {limit:g}"
        return Verdict("fail", e, results, interval, reason)
    if missing := _missing(state, settings, results, interval):
        return Verdict("inconclusive", e, results, interval, "; ".join(missing))
    return Verdict("pass", e, results, interval, f"no guard is worse after {state.num_canary} responses of the canary")


def _guard_results(state: JudgeState, settings: JudgeSettings) -> dict[str, GuardResult]:
    rates = [
        errors / n if n else 0.0
        for errors, n in ((state.canary_errors, state.num_canary), (state.control_errors, state.num_control))
    ]
    results = {ERRORS: GuardResult(_e(state.errors_log_e), rates[0] - rates[1], settings.min_error_increase)}
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
    if guard == ERRORS:
        return (
            f"errors: {state.canary_errors} of {state.num_canary} responses of the canary, {state.control_errors} of "
            f"{state.num_control} of the control"
        )
    if guard == LATENCY:
        return (
            f"latency: the canary took over {settings.latency_tolerance:g} times as long in {state.num_slower} of "
            f"{state.num_pairs} pairs"
        )
    evidence = state.guards[guard]
    return f"{guard}: another distribution, corrected PSI {corrected_psi(evidence.control, evidence.canary):.2f}"


def _missing(
    state: JudgeState, settings: JudgeSettings, results: Mapping[str, GuardResult], interval: tuple[float, float]
) -> list[str]:
    """What a pass still needs, in words."""
    missing = []
    if state.num_canary < settings.min_responses:
        missing.append(f"{state.num_canary} of {settings.min_responses} responses of the canary")
    if interval[1] >= settings.max_error_increase:
        missing.append(
            f"errors: at most {100 * interval[1]:.1f} points more are possible, {100 * settings.max_error_increase:g} "
            "are allowed"
        )
    if settings.judges_latency and (e := _e(state.not_slower_log_e)) < 1 / settings.alpha:
        missing.append(f"latency: E = {e:.3g} of {1 / settings.alpha:g} that the canary is not slower")
    for guard in settings.guards:
        evidence = state.guards.get(guard, CellEvidence())
        if (num := min(sum(evidence.control.values()), sum(evidence.canary.values()))) < MIN_SAMPLES:
            missing.append(f"{guard}: {num} of {MIN_SAMPLES} values")
        elif results[guard].effect > settings.max_psi:
            missing.append(
                f"{guard}: the corrected PSI is {results[guard].effect:.2f}, {settings.max_psi:g} is allowed"
            )
    return missing


def serialize(state: JudgeState) -> bytes:
    """Encode as JSON."""
    return msgspec.json.encode(state)


def deserialize(raw: bytes | str) -> JudgeState:
    """Decode what `serialize` returned. Raises msgspec.MsgspecError."""
    return msgspec.json.decode(raw, type=JudgeState)
