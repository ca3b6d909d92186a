"""What `noria bench cost` can be told. Light, since the command line reads it before it knows what is asked for."""

from dataclasses import dataclass
from typing import Literal, get_args

Part = Literal["metrics", "logs", "live"]
"""What is measured: counting and being scraped, logging, one open page /live."""

PARTS: tuple[Part, ...] = get_args(Part)


@dataclass(frozen=True)
class CostOptions:
    """Of one bench."""

    pairs: int = 80
    requests: int = 32  # of each run
    users: int = 16
    parts: tuple[Part, ...] = PARTS
    seed: int = 1


def read_parts(text: str) -> tuple[Part, ...]:
    """`metrics,live` as parts, `none` as no part; raises ValueError naming all of them."""
    asked = [] if text == "none" else text.split(",")
    if unknown := [name for name in asked if name not in PARTS]:
        raise ValueError(f"{unknown[0]!r}; parts are {', '.join(PARTS)}, or none")
    return tuple(part for part in PARTS if part in asked)


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
