"""Options of `noria bench cluster`. Imports little: the command line reads it before it knows which command runs."""

from dataclasses import dataclass

from noria_bench.option_values import read_number, read_whole_numbers


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


def read_engines(text: str) -> tuple[int, ...]:
    """Parse `1,2,4`. Raises ValueError unless all are 1 to 64."""
    allowed = "numbers of engines are whole numbers from 1 to 64, such as 1,2,4"
    return tuple(sorted(set(read_whole_numbers(text, 1, 64, allowed))))


def read_step_ms(text: str) -> float:
    """Parse the milliseconds of a step. Raises ValueError unless they are 1 to 10000."""
    return read_number(text, 1, 10_000, "a step takes 1 to 10000 milliseconds")
