"""What `noria bench cost` can be told. Light, since the command line reads it before it knows what is asked for."""

from dataclasses import dataclass
from typing import Literal, get_args

Feature = Literal["metrics", "logs", "live"]
"""What is measured: counting and being scraped, logging, one open page /live."""

FEATURES: tuple[Feature, ...] = get_args(Feature)


@dataclass(frozen=True)
class CostOptions:
    """Of one bench."""

    num_pairs: int = 80
    num_requests: int = 32  # of each run
    num_users: int = 16
    features: tuple[Feature, ...] = FEATURES
    seed: int = 1


def read_features(text: str) -> tuple[Feature, ...]:
    """`metrics,live` as parts, `none` as no part; raises ValueError naming all of them."""
    names = [] if text == "none" else text.split(",")
    if unknown := [name for name in names if name not in FEATURES]:
        raise ValueError(f"{unknown[0]!r}; parts are {', '.join(FEATURES)}, or none")
    return tuple(feature for feature in FEATURES if feature in names)


def read_pairs(text: str) -> int:
    """How many pairs; raises ValueError where it is no number of them."""
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= 1000:
        raise ValueError(f"{text!r}; it is a whole number of pairs from 1 to 1000")
    return int(text)


def read_requests(text: str) -> int:
    """How many requests a run has; raises ValueError where it is no number of them."""
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= 4096:
        raise ValueError(f"{text!r}; it is a whole number of requests from 1 to 4096")
    return int(text)


def read_users(text: str) -> int:
    """How many users; raises ValueError where it is no number of them."""
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= 256:
        raise ValueError(f"{text!r}; it is a whole number of users from 1 to 256")
    return int(text)
