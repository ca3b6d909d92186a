"""What Noria set out to show, and whether a group of runs shows it. Pure."""

import math
from dataclasses import dataclass

from noria.bench.reports.figures import figures_of, ratio
from noria.bench.reports.grid import number, rate
from noria.bench.reports.groups import Group
from noria.bench.reports.tables import BASE
from noria.bench.targets.catalog import TARGETS

_RPS_OVER_SEED = 2.0  # at least, on mixed traffic
_P99_OF_SEED = 0.25  # at most, on mixed traffic


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
    ours = group.of("noria")
    if ours is None:
        return [Goal("Noria was not among the targets.", None)]
    found = figures_of(ours)
    rates, tails = {}, {}
    for name, target in TARGETS.items():
        run = group.of(name) if target.peer is not None else None
        if run is not None:
            rates[name], tails[name] = figures_of(run).requests_per_s, figures_of(run).p99_ms
    goals = [_no_peer_quicker(found.requests_per_s, rates), _no_peer_shorter(found.p99_ms, tails)]
    if group.bench == "mixed":
        seed = group.of(BASE)
        theirs = figures_of(seed) if seed else None
        goals.append(_rate_over_seed(found.requests_per_s, theirs.requests_per_s if theirs else math.nan))
        goals.append(_tail_of_seed(found.p99_ms, theirs.p99_ms if theirs else math.nan))
    return goals


def _no_peer_quicker(ours: float, peers: dict[str, float]) -> Goal:
    told = f"No peer ahead on RPS: Noria {rate(ours)}"
    if not peers or math.isnan(ours):
        return Goal(f"{told}; no peer was measured.", None)
    name = max(peers, key=lambda peer: peers[peer])
    behind = 1 - ratio(ours, peers[name])
    missed = f", {100 * behind:.1f} % behind" if behind > 0 else ""
    return Goal(f"{told}, best peer {name} {rate(peers[name])}{missed}.", ours >= peers[name])


def _no_peer_shorter(ours_ms: float, peers_ms: dict[str, float]) -> Goal:
    told = f"No peer ahead on p99: Noria {_ms(ours_ms)}"
    if not peers_ms or math.isnan(ours_ms):
        return Goal(f"{told}; no peer was measured.", None)
    name = min(peers_ms, key=lambda peer: peers_ms[peer])
    longer = ratio(ours_ms, peers_ms[name]) - 1
    missed = f", {100 * longer:.1f} % longer" if longer > 0 else ""
    met = None if math.isinf(ours_ms) and math.isinf(peers_ms[name]) else ours_ms <= peers_ms[name]
    return Goal(f"{told}, best peer {name} {_ms(peers_ms[name])}{missed}.", met)


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
