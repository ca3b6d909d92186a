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
# What is compared with frameworks: in words, the field of the summary, its sign, and how one is worse.
_RPS, _P99 = ("RPS", "requests_per_s", 1, "behind"), ("p99", "p99_ms", -1, "longer")


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
    goals = [_best_framework_goal(noria, frameworks, *figure) for figure in (_RPS, _P99)]
    if group.bench == "mixed":
        goals.append(
            _rps_over_reference_goal(noria.requests_per_s, reference.requests_per_s if reference else math.nan)
        )
        goals.append(_p99_over_reference_goal(noria.p99_ms, reference.p99_ms if reference else math.nan))
    return goals


def _best_framework_goal(
    noria: RunSummary, frameworks: Mapping[str, RunSummary], what: str, field: str, sign: int, worse: str
) -> Goal:
    """Noria's figure is at least as good as the best framework's; `sign` is 1 if more is better, else -1."""
    text = format_rate if field == "requests_per_s" else _format_latency
    ours = getattr(noria, field)
    claim = f"No framework ahead on {what}: Noria {text(ours)}"
    if not frameworks or math.isnan(ours):
        return Goal(f"{claim}; no framework was measured.", None)
    name = max(frameworks, key=lambda framework: sign * getattr(frameworks[framework], field))
    best = getattr(frameworks[name], field)
    shortfall = sign * (1 - finite_ratio(ours, best))
    missed = f", {100 * shortfall:.1f} % {worse}" if shortfall > _ROUNDING else ""
    met = None if math.isinf(ours) and math.isinf(best) else sign * ours >= sign * best * (1 - sign * _ROUNDING)
    return _goal_among_all_frameworks(f"{claim}, best framework {name} {text(best)}{missed}", met, frameworks)


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
