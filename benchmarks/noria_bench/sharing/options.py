"""The command `noria bench sharing` and its options. Imports little: the command line reads it."""

from dataclasses import dataclass

from noria_bench.command_arguments import BenchCommand
from noria_bench.option_values import ROUNDS, SECONDS


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

COMMAND = BenchCommand(
    "sharing",
    "what embeddings and images from one server cost each other",
    "Measure what embeddings and images from one server cost each other, by how the cores are divided.",
    SharingOptions(),
    (
        ("--seconds", "seconds", SECONDS, "of each load, twice as long of the open loop"),
        ("--rounds", "num_rounds", ROUNDS, "in which all divisions of the cores are measured in turn"),
    ),
    usage="[MODEL] [--quick] [--out FOLDER]",
    seed_of="the images and arrivals",
    quick=QUICK,
    quick_help="one short round, in some two minutes",
)
