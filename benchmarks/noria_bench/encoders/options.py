"""Options of `noria bench encoders`. Imports little: the command line reads it before it knows which command runs."""

from dataclasses import dataclass
from typing import Literal, get_args

from noria_bench.option_values import read_number, read_whole, read_whole_numbers

Corpus = Literal["fixed", "mixed"]
"""The texts: one sentence, as the reference article sent it, or texts of many lengths."""

CORPORA: tuple[Corpus, ...] = get_args(Corpus)

# In the order of the tables.
TARGETS = (
    "raw",
    "raw-bfloat16",
    "noria",
    "noria-8",
    "noria-bfloat16",
    "fastapi",
    "triton-1",
    "triton-1-batching",
    "triton-n",
    "triton-n-batching",
    "triton-best",
    "litserve",
    "bentoml",
    "infinity",
)
_NO_DEFAULTS = ("noria-8", "triton-n", "triton-n-batching", "infinity")
_DEFAULT_TARGETS = tuple(name for name in TARGETS if name not in _NO_DEFAULTS)


@dataclass(frozen=True)
class EncodersOptions:
    """The measurements to make; each load takes `seconds`."""

    targets: tuple[str, ...] = _DEFAULT_TARGETS
    connections: tuple[int, ...] = (1, 16, 128)
    seconds: float = 4.0
    corpora: tuple[Corpus, ...] = CORPORA
    load_percents: tuple[int, ...] = (30, 60, 85)  # rates of an open loop, in % of the raw loop's texts per second
    num_rounds: int = 2
    sweeps: bool = True  # whether the best settings are looked for; otherwise the first candidates are used
    seed: int = 1


QUICK = EncodersOptions(connections=(1, 16), seconds=2.0, load_percents=(60,), num_rounds=1, sweeps=False)
"""A run of some three minutes, which shows that all works."""


def read_targets(text: str) -> tuple[str, ...]:
    """Parse `noria,triton-1` or `all`, in the order of the tables. Raises ValueError, with all names."""
    names = list(TARGETS) if text == "all" else text.split(",")
    if unknown := [name for name in names if name not in TARGETS]:
        raise ValueError(f"{unknown[0]!r}; targets are all, {', '.join(TARGETS)}")
    return tuple(name for name in TARGETS if name in names)


def read_connections(text: str) -> tuple[int, ...]:
    """Parse `1,16,128`. Raises ValueError unless all are 1 to 128."""
    allowed = "connections are whole numbers from 1 to 128, such as 1,16,128"
    return tuple(sorted(set(read_whole_numbers(text, 1, 128, allowed))))


def read_open_loops(text: str) -> tuple[int, ...]:
    """Parse `30,60,85` or `none`. Raises ValueError unless all are 1 to 100."""
    allowed = "open loops are none, or percents of the raw loop's rate, such as 30,60,85"
    return () if text == "none" else tuple(sorted(set(read_whole_numbers(text, 1, 100, allowed))))


def read_corpora(text: str) -> tuple[Corpus, ...]:
    """Parse `fixed`, `mixed` or `all`. Raises ValueError for another word."""
    if text not in ("all", *CORPORA):
        raise ValueError(f"{text!r}; a corpus is {', '.join(CORPORA)} or all")
    return tuple(corpus for corpus in CORPORA if text in ("all", corpus))


def read_seconds(text: str) -> float:
    """Parse the seconds of a load. Raises ValueError unless it is 1 to 600."""
    return read_number(text, 1, 600, "a load takes 1 to 600 seconds")


def read_rounds(text: str) -> int:
    """Parse the number of rounds. Raises ValueError unless it is 1 to 20."""
    return read_whole(text, 1, 20, "it is a whole number of rounds from 1 to 20")
