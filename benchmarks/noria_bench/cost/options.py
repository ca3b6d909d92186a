"""Options of `noria bench cost`. Imports little: the command line reads it before it knows which command runs."""

from dataclasses import dataclass
from typing import Literal, get_args

from noria_bench.option_values import read_whole

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


def read_features(text: str) -> tuple[Feature, ...]:
    """Parse `metrics,live`, or `none`. Raises ValueError, listing all names, for an unknown one."""
    names = [] if text == "none" else text.split(",")
    if unknown := [name for name in names if name not in FEATURES]:
        raise ValueError(f"{unknown[0]!r}; features are {', '.join(FEATURES)}, or none")
    return tuple(feature for feature in FEATURES if feature in names)


def read_pairs(text: str) -> int:
    """Parse the number of pairs. Raises ValueError unless it is 1 to 1000."""
    return read_whole(text, 1, 1000, "it is a whole number of pairs from 1 to 1000")


def read_requests(text: str) -> int:
    """Parse the number of requests. Raises ValueError unless it is 1 to 4096."""
    return read_whole(text, 1, 4096, "it is a whole number of requests from 1 to 4096")


def read_users(text: str) -> int:
    """Parse the number of users. Raises ValueError unless it is 1 to 256."""
    return read_whole(text, 1, 256, "it is a whole number of users from 1 to 256")
