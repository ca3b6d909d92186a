"""Options of `noria bench sharing`. Imports little: the command line reads it before it knows which command runs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SharingOptions:
    """The measurements to make; each load takes `seconds`, an open loop twice as long."""

    connections: tuple[int, ...] = (1, 4)  # connections of the closed loops of texts
    rate: float = 30.0  # rate of the open loop of texts, in requests per second
    num_users: int = 4  # users who request images
    seconds: float = 4.0
    num_rounds: int = 2
    seed: int = 1


QUICK = SharingOptions(connections=(1,), seconds=1.0, num_rounds=1)
"""A run of about a minute, which shows that all works."""
