"""What Noria set out to show, and whether a group of runs shows it. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from noria.bench.reports.figures import Figures, figures_of, ratio
from noria.bench.reports.grid import number, rate
from noria.bench.reports.groups import Group
from noria.bench.reports.tables import BASE
from noria.bench.targets.catalog import PEERS

_RPS_OVER_SEED = 2.0  # at least, on mixed traffic
_P99_OF_SEED = 0.25  # at most, on mixed traffic
_ROUNDING = 1e-9  # of sums of floats: equals are not ahead of each other


@dataclass(frozen=True)
class Goal:
    """`met` is None where the runs cannot tell."""

    text: str
    met: bool | None

    @property
    def verdict(self) -> str:
        """In a word."""
        return {True: "Met", False: "Missed", None: "Cannot be said"}[self.met]


def goals_of(group: Group) -> list[Goal]:
    """Those that the group was made to show: of scenario 2, and of mixed traffic."""
    if group.bench not in ("scenario2", "mixed"):
        return []
    # A run that was cut short is no scenario: users were still to come.
    found = {run.target: figures_of(run) for run in group.runs if run.complete and run.records}
    ours, seed = found.get("noria"), found.get(BASE)
    if ours is None:
        return [Goal("Noria was not measured to the end.", None)]
    peers = {name: found[name] for name in PEERS if name in found}
    goals = [_no_peer_quicker(ours, peers), _no_peer_shorter(ours, peers)]
    if group.bench == "mixed":
        goals.append(_rate_over_seed(ours.requests_per_s, seed.requests_per_s if seed else math.nan))
        goals.append(_tail_of_seed(ours.p99_ms, seed.p99_ms if seed else math.nan))
    return goals


def _no_peer_quicker(ours: Figures, peers: Mapping[str, Figures]) -> Goal:
    told = f"No peer ahead on RPS: Noria {rate(ours.requests_per_s)}"
    if not peers or math.isnan(ours.requests_per_s):
        return Goal(f"{told}; no peer was measured.", None)
    name = max(peers, key=lambda peer: peers[peer].requests_per_s)
    best = peers[name].requests_per_s
    behind = 1 - ratio(ours.requests_per_s, best)
    missed = f", {100 * behind:.1f} % behind" if behind > _ROUNDING else ""
    met = ours.requests_per_s >= best * (1 - _ROUNDING)
    return _beside_all(f"{told}, best peer {name} {rate(best)}{missed}", met, peers)


def _no_peer_shorter(ours: Figures, peers: Mapping[str, Figures]) -> Goal:
    told = f"No peer ahead on p99: Noria {_ms(ours.p99_ms)}"
    if not peers or math.isnan(ours.p99_ms):
        return Goal(f"{told}; no peer was measured.", None)
    name = min(peers, key=lambda peer: peers[peer].p99_ms)
    best_ms = peers[name].p99_ms
    longer = ratio(ours.p99_ms, best_ms) - 1
    missed = f", {100 * longer:.1f} % longer" if longer > _ROUNDING else ""
    met = None if math.isinf(ours.p99_ms) and math.isinf(best_ms) else ours.p99_ms <= best_ms * (1 + _ROUNDING)
    return _beside_all(f"{told}, best peer {name} {_ms(best_ms)}{missed}", met, peers)


def _beside_all(told: str, met: bool | None, peers: Mapping[str, Figures]) -> Goal:
    """One peer ahead is enough to miss; that none is can be said only when all were measured."""
    if not (left := [name for name in PEERS if name not in peers]):
        return Goal(f"{told}.", met)
    return Goal(f"{told}; {', '.join(left)} not measured.", None if met else met)


def _rate_over_seed(ours: float, seed: float) -> Goal:
    told = f"RPS at least {_RPS_OVER_SEED:g} × {BASE}’s"
    reached = ratio(ours, seed)
    if math.isnan(reached):
        return Goal(f"{told}: one of them answered nothing, or was not measured.", None)
    missed = f", {100 * (1 - reached / _RPS_OVER_SEED):.1f} % short" if reached < _RPS_OVER_SEED else ""
    return Goal(f"{told}: {number(reached, 2)} × ({rate(ours)} to {rate(seed)}){missed}.", reached >= _RPS_OVER_SEED)


def _tail_of_seed(ours_ms: float, seed_ms: float) -> Goal:
    told = f"p99 at most 1/4 of {BASE}’s"
    if math.isnan(ours_ms) or math.isnan(seed_ms) or math.isinf(ours_ms):
        met = False if math.isinf(ours_ms) and math.isfinite(seed_ms) else None
        return Goal(f"{told}: Noria {_ms(ours_ms)}, {BASE} {_ms(seed_ms)}.", met)
    if math.isinf(seed_ms):
        return Goal(f"{told}: Noria {_ms(ours_ms)}, {BASE} left requests without images.", True)
    reached = ours_ms / seed_ms
    missed = f", {reached / _P99_OF_SEED:.2f} times what was aimed at" if reached > _P99_OF_SEED else ""
    told = f"{told}: {number(reached, 2)} ({_ms(ours_ms)} to {_ms(seed_ms)}){missed}."
    return Goal(told, reached <= _P99_OF_SEED)


def _ms(value: float) -> str:
    """A latency; an endless one in words."""
    if math.isnan(value):
        return "not measured"
    return "endless" if math.isinf(value) else f"{value:.0f} ms"
