"""The performance goals of Noria, and whether a group of runs meets them. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from noria_bench.reports.comparison_tables import BASELINE
from noria_bench.reports.run_groups import Group
from noria_bench.reports.run_summary import RunSummary, finite_ratio, summarise_run
from noria_bench.reports.table import format_number, format_rate
from noria_bench.targets.catalog import FRAMEWORKS, TARGETS

# Ratios of Noria to the reference server on mixed traffic.
_MIN_RPS_RATIO = 2.0
_MAX_P99_RATIO = 0.25
# Tolerance for sums of floats.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Goal:
    """`met` is None if the runs do not decide it."""

    text: str
    met: bool | None

    @property
    def verdict(self) -> str:
        """`met` in words."""
        return {True: "Met", False: "Missed", None: "Undecided"}[self.met]


def goals_of(group: Group) -> list[Goal]:
    """The goals of scenario 2 and of mixed traffic; none for other benches."""
    if group.bench not in ("scenario2", "mixed"):
        return []
    # An interrupted run lacks users that had not started yet.
    summaries = {run.target: summarise_run(run) for run in group.main_runs if run.complete and run.records}
    noria, reference = summaries.get("noria"), summaries.get(BASELINE)
    if noria is None:
        return [Goal("Noria was not measured completely.", None)]
    frameworks = {name: each for name, each in summaries.items() if name in TARGETS and TARGETS[name].framework}
    goals = [_rps_goal(noria, frameworks), _p99_goal(noria, frameworks)]
    if group.bench == "mixed":
        goals.append(
            _rps_over_reference_goal(noria.requests_per_s, reference.requests_per_s if reference else math.nan)
        )
        goals.append(_p99_over_reference_goal(noria.p99_ms, reference.p99_ms if reference else math.nan))
    return goals


def _rps_goal(noria: RunSummary, frameworks: Mapping[str, RunSummary]) -> Goal:
    claim = f"No framework ahead on RPS: Noria {format_rate(noria.requests_per_s)}"
    if not frameworks or math.isnan(noria.requests_per_s):
        return Goal(f"{claim}; no framework was measured.", None)
    name = max(frameworks, key=lambda framework: frameworks[framework].requests_per_s)
    best = frameworks[name].requests_per_s
    shortfall = 1 - finite_ratio(noria.requests_per_s, best)
    missed = f", {100 * shortfall:.1f} % behind" if shortfall > _ROUNDING else ""
    met = noria.requests_per_s >= best * (1 - _ROUNDING)
    return _goal_among_all_frameworks(f"{claim}, best framework {name} {format_rate(best)}{missed}", met, frameworks)


def _p99_goal(noria: RunSummary, frameworks: Mapping[str, RunSummary]) -> Goal:
    claim = f"No framework ahead on p99: Noria {_format_latency(noria.p99_ms)}"
    if not frameworks or math.isnan(noria.p99_ms):
        return Goal(f"{claim}; no framework was measured.", None)
    name = min(frameworks, key=lambda framework: frameworks[framework].p99_ms)
    best_ms = frameworks[name].p99_ms
    excess = finite_ratio(noria.p99_ms, best_ms) - 1
    missed = f", {100 * excess:.1f} % longer" if excess > _ROUNDING else ""
    met = None if math.isinf(noria.p99_ms) and math.isinf(best_ms) else noria.p99_ms <= best_ms * (1 + _ROUNDING)
    return _goal_among_all_frameworks(
        f"{claim}, best framework {name} {_format_latency(best_ms)}{missed}", met, frameworks
    )


def _goal_among_all_frameworks(claim: str, met: bool | None, frameworks: Mapping[str, RunSummary]) -> Goal:
    """Return the goal: one faster framework is enough to miss it; it is met only if all frameworks were measured."""
    measured = {TARGETS[name].framework for name in frameworks}
    if not (unmeasured := [name for name in FRAMEWORKS if name not in measured]):
        return Goal(f"{claim}.", met)
    return Goal(f"{claim}; {', '.join(unmeasured)} not measured.", None if met else met)


def _rps_over_reference_goal(noria_rps: float, reference_rps: float) -> Goal:
    claim = f"RPS at least {_MIN_RPS_RATIO:g} × {BASELINE}’s"
    reached = finite_ratio(noria_rps, reference_rps)
    if math.isnan(reached):
        return Goal(f"{claim}: one of them answered no request, or was not measured.", None)
    missed = f", {100 * (1 - reached / _MIN_RPS_RATIO):.1f} % short" if reached < _MIN_RPS_RATIO else ""
    return Goal(
        f"{claim}: {format_number(reached, 2)} × ({format_rate(noria_rps)} to {format_rate(reference_rps)}){missed}.",
        reached >= _MIN_RPS_RATIO,
    )


def _p99_over_reference_goal(noria_ms: float, reference_ms: float) -> Goal:
    claim = f"p99 at most 1/4 of {BASELINE}’s"
    if math.isnan(noria_ms) or math.isnan(reference_ms) or math.isinf(noria_ms):
        met = False if math.isinf(noria_ms) and math.isfinite(reference_ms) else None
        return Goal(f"{claim}: Noria {_format_latency(noria_ms)}, {BASELINE} {_format_latency(reference_ms)}.", met)
    if math.isinf(reference_ms):
        return Goal(f"{claim}: Noria {_format_latency(noria_ms)}, {BASELINE} left requests without images.", True)
    reached = noria_ms / reference_ms
    missed = f", {reached / _MAX_P99_RATIO:.2f} times the goal" if reached > _MAX_P99_RATIO else ""
    latencies = f"{_format_latency(noria_ms)} to {_format_latency(reference_ms)}"
    return Goal(f"{claim}: {format_number(reached, 2)} ({latencies}){missed}.", reached <= _MAX_P99_RATIO)


def _format_latency(value: float) -> str:
    """A latency in ms, or in words if it is not finite."""
    if math.isnan(value):
        return "not measured"
    return "infinite" if math.isinf(value) else f"{value:.0f} ms"
