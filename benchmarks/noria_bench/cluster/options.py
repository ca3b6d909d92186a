"""The command `noria bench cluster` and its options. Imports little: the command line reads it."""

from dataclasses import dataclass

from noria_bench.command_arguments import BenchCommand
from noria_bench.option_values import ROUNDS, SECONDS, ordered, wholes


@dataclass(frozen=True)
class ClusterOptions:
    """The measurements to make; each load takes `seconds`."""

    engines: tuple[int, ...] = (1, 2, 4)  # with short steps, in pairs of both servers
    scaling: tuple[int, ...] = (1, 2, 4, 8, 16)  # engines with long steps
    step_ms: float = 20.0
    long_step_ms: float = 100.0
    seconds: float = 5.0
    num_rounds: int = 3  # rounds of short steps; long ones are measured once


QUICK = ClusterOptions(engines=(1, 2), scaling=(1, 2), seconds=3.0, num_rounds=1)
"""A run of about two minutes, which shows that all works."""

_ENGINES = ordered(wholes(1, 64, "numbers of engines are whole numbers from 1 to 64, such as 1,2,4"))

COMMAND = BenchCommand(
    "cluster",
    "on Ray beside the plain server, with a device that sleeps",
    "Measure what serving on Ray costs, and how both servers scale, with engines whose device sleeps.",
    ClusterOptions(),
    (
        ("--engines A,B", "engines", _ENGINES, "with short steps, in pairs of both servers"),
        ("--scaling A,B", "scaling", _ENGINES, "engines with long steps"),
        ("--seconds", "seconds", SECONDS, "of each load"),
        ("--rounds", "num_rounds", ROUNDS, "in which both servers are measured in turn, with short steps"),
    ),
    quick=QUICK,
    quick_help="1 and 2 engines, one short round: some two minutes",
)
