"""Options of `noria bench deploys`. Imports little: the command line reads it before it knows which command runs."""

from dataclasses import dataclass


@dataclass(frozen=True)
class DeploysOptions:
    """The measurements to make."""

    niceness: tuple[int, ...] = (19, 0)  # niceness of loading, each with servers of its own
    image_users: int = 8
    text_users: int = 64
    pause_s: float = 1.0  # pause of each user, from an answer to the next request
    seconds: float = 30.0  # before a deployment, and after it
    num_rounds: int = 2
    seed: int = 1


QUICK = DeploysOptions(image_users=2, text_users=4, seconds=5.0, num_rounds=1)
"""A short run, which shows that all works."""
