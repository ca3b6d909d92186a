"""What `noria bench contract` can be told. Light, since the command line reads it before it knows what is asked for."""

from dataclasses import dataclass
from typing import Literal, get_args

from noria_bench.load.workload import Arrivals

DeadlineTarget = Literal["least-slack", "shortest-first", "fcfs", "seed"]
"""A policy of Noria's, or the seed's server."""

DEADLINE_TARGETS: tuple[DeadlineTarget, ...] = get_args(DeadlineTarget)
ARRIVALS: tuple[Arrivals, ...] = get_args(Arrivals)


@dataclass(frozen=True)
class DeadlineOptions:
    """Of one bench; `loads` are per cent of Noria's measured capacity."""

    loads: tuple[int, ...] = (50, 75, 90, 110, 130, 150)
    seconds: float = 30.0
    targets: tuple[DeadlineTarget, ...] = DEADLINE_TARGETS
    mix: str = "mixed"
    arrivals: Arrivals = "poisson"
    seed: int = 1


def read_loads(text: str) -> tuple[int, ...]:
    """`50,90` as numbers; raises ValueError saying what a load is."""
    try:
        loads = tuple(int(part) for part in text.split(","))
    except ValueError:
        loads = ()
    if not loads or not all(1 <= load <= 1000 for load in loads):
        raise ValueError(f"{text!r}; loads are whole per cents of capacity from 1 to 1000, such as 50,90,130")
    return tuple(sorted(set(loads)))


def read_deadline_targets(text: str) -> tuple[DeadlineTarget, ...]:
    """`fcfs,seed` as targets; raises ValueError naming all of them."""
    names = text.split(",")
    if unknown := [name for name in names if name not in DEADLINE_TARGETS]:
        raise ValueError(f"{unknown[0]!r}; policies are {', '.join(DEADLINE_TARGETS)}")
    return tuple(target for target in DEADLINE_TARGETS if target in names)


def read_seconds(text: str) -> float:
    """A run's length; raises ValueError where it is none."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1.0 <= seconds <= 3600.0:
        raise ValueError(f"{text!r}; a run lasts 1 to 3600 seconds")
    return seconds
