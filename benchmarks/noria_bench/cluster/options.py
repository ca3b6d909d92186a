"""Options of `noria bench cluster`. Imports little: the command line reads it before it knows which command runs."""

from dataclasses import dataclass


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
