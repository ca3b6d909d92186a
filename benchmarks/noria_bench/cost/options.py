"""Options of `noria bench cost`. Imports little: the command line reads it before it knows which command runs."""

from dataclasses import dataclass
from typing import Literal, get_args

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
