"""The command `noria bench deadlines` and its options. Imports little: the command line reads it."""

from dataclasses import dataclass
from typing import Literal, get_args

from noria_bench.command_arguments import BenchCommand
from noria_bench.load.workload import MIXES, Arrivals
from noria_bench.option_values import LOADS, names, number, one_of

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


_SECONDS = number(1, 3600, "a run lasts 1 to 3600 seconds")
_POLICIES = names(DEADLINE_TARGETS, "policies")

COMMAND = BenchCommand(
    "deadlines",
    "which requests meet their deadlines",
    "Measure which requests meet their deadlines at 50 to 150 % of capacity, by policy, in about half an hour.",
    DeadlineOptions(),
    (
        ("--loads", "loads", LOADS, "per cents of Noria's capacity"),
        ("--seconds", "seconds", _SECONDS, "during which requests arrive in each run"),
        ("--policies", "targets", _POLICIES, "of Noria, or reference for the reference server"),
        ("--mix", "mix", one_of(MIXES, "mixes"), f"of {', '.join(MIXES)}"),
        ("--arrivals", "arrivals", one_of(ARRIVALS, "arrivals"), f"of {', '.join(ARRIVALS)}"),
    ),
    usage="[MODEL] [--loads A,B] [--out FOLDER]",
    seed_of="the requests",
    module="noria_bench.benches.deadlines",
)
