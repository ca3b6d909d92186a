"""Options of `noria bench deadlines`. Imports little: the command line reads it before it knows which command runs."""

from dataclasses import dataclass
from typing import Literal, get_args

from noria_bench.load.workload import Arrivals

DeadlineTarget = Literal["fair", "least-slack", "shortest-first", "fcfs", "reference"]
"""A scheduling policy of Noria, or the reference server (the target `reference-batched`)."""

DEADLINE_TARGETS: tuple[DeadlineTarget, ...] = get_args(DeadlineTarget)
ARRIVALS: tuple[Arrivals, ...] = get_args(Arrivals)


@dataclass(frozen=True)
class DeadlineOptions:
    """`loads` are per cents of Noria's measured capacity; `seconds` is how long requests arrive in each run."""

    loads: tuple[int, ...] = (50, 75, 90, 110, 130, 150)
    seconds: float = 30.0
    targets: tuple[DeadlineTarget, ...] = DEADLINE_TARGETS
    mix: str = "mixed"
    arrivals: Arrivals = "poisson"
    seed: int = 1
