"""The command `noria bench cost` and its options. Imports little: the command line reads it."""

from dataclasses import dataclass
from typing import Literal, get_args

from noria_bench.command_arguments import BenchCommand
from noria_bench.option_values import names, whole

Feature = Literal["metrics", "logs", "live"]
"""A feature whose cost is measured: metrics and their scrapes, logs, one open page /live."""

FEATURES: tuple[Feature, ...] = get_args(Feature)


@dataclass(frozen=True)
class CostOptions:
    """`num_requests` and `num_users` are of each run."""

    num_pairs: int = 80
    num_requests: int = 32
    num_users: int = 16
    features: tuple[Feature, ...] = FEATURES
    seed: int = 1


_PAIRS = whole(1, 1000, "it is a whole number of pairs from 1 to 1000")


def _read_features(text: str) -> tuple[str, ...]:
    return () if text == "none" else names(FEATURES, "features besides none")(text)


COMMAND = BenchCommand(
    "cost",
    "the cost of metrics, logs and an open page /live",
    "Measure what metrics, logs and an open page /live cost in throughput, and how long a scrape takes.",
    CostOptions(),
    (
        ("--pairs", "num_pairs", _PAIRS, "number of pairs of runs, with and without"),
        ("--features A,B", "features", _read_features, "that one side has and the other not; none: two equal servers"),
    ),
    usage="[MODEL] [-o FILE] [--features A,B]",
    seed_of="the requests",
    has_folder=False,
)
