"""The command `noria bench deploys` and its options. Imports little: the command line reads it."""

from dataclasses import dataclass

from noria_bench.command_arguments import BenchCommand
from noria_bench.option_values import ROUNDS, SECONDS, USERS, wholes


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

_NICENESS = wholes(0, 19, "a niceness is a whole number from 0 to 19, such as 19,0")

COMMAND = BenchCommand(
    "deploys",
    "latencies while versions of models change",
    "Measure latencies before, while and after versions of models are deployed, by the niceness of loading.",
    DeploysOptions(),
    (
        ("--niceness A,B", "niceness", _NICENESS, "of loading, 0 to 19, each with servers of its own"),
        ("--image-users", "image_users", USERS, "of images"),
        ("--text-users", "text_users", USERS, "of texts"),
        ("--seconds", "seconds", SECONDS, "before a deployment, and after it"),
        ("--rounds", "num_rounds", ROUNDS, "in which all values of the niceness are measured in turn"),
    ),
    usage="[MODEL] [--quick] [--out FOLDER]",
    seed_of="the images",
    quick=QUICK,
    quick_help="one short round of few users",
)
