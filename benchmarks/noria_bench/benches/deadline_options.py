"""Options of `noria bench deadlines`. Imports little: the command line reads it before it knows which command runs."""

from dataclasses import dataclass
from typing import Literal, get_args

from noria_bench.load.workload import Arrivals
from noria_bench.option_values import read_number

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


def read_loads(text: str) -> tuple[int, ...]:
    """Parse `50,90`; sorted, without duplicates. Raises ValueError for anything but whole per cents from 1 to 1000."""
    try:
        loads = tuple(int(part) for part in text.split(","))
    except ValueError:
        loads = ()
    if not loads or not all(1 <= load <= 1000 for load in loads):
        raise ValueError(f"{text!r}; loads are whole per cents of capacity from 1 to 1000, such as 50,90,130")
    return tuple(sorted(set(loads)))


def read_deadline_targets(text: str) -> tuple[DeadlineTarget, ...]:
    """Parse `fcfs,reference`, in the order of the tables. Raises ValueError, listing all names, for an unknown one."""
    names = text.split(",")
    if unknown := [name for name in names if name not in DEADLINE_TARGETS]:
        raise ValueError(f"{unknown[0]!r}; policies are {', '.join(DEADLINE_TARGETS)}")
    return tuple(target for target in DEADLINE_TARGETS if target in names)


def read_seconds(text: str) -> float:
    """Parse the length of a run. Raises ValueError unless it is 1 to 3600 seconds."""
    return read_number(text, 1, 3600, "a run lasts 1 to 3600 seconds")
