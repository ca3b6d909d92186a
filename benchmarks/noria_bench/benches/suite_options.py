"""What `noria bench scenario1`, `scenario2`, `mixed` and `sweep` can be told. Light, since the command line reads it first."""

from dataclasses import dataclass
from typing import Literal, get_args

from noria_bench.targets.catalog import Target, read_targets

ArrivalsOption = Literal["poisson", "bursty", "both"]
ARRIVALS: tuple[ArrivalsOption, ...] = get_args(ArrivalsOption)
SWEEPS = ("attention", "channels-last", "dtype", "compile", "batching", "slots", "policy")
PEERS_SWEEP = "peers"  # which `all` leaves out, since it needs what not everybody has installed
DEFAULT_LOAD = 80  # per cent of Noria's capacity, in `noria bench mixed`
FULL_S = 900.0  # the seed article's 15 minutes


@dataclass(frozen=True)
class SuiteOptions:
    """Of the benches that hold targets against each other; `mixed` alone reads what is after `seed`."""

    targets: tuple[Target, ...] = read_targets("noria,seed-batched")
    seconds: float | None = None  # of each run; None: the bench's own
    full: bool = False  # 15 minutes where nobody says, and whole grids
    seed: int = 1  # of the dice that draw the requests
    arrivals: ArrivalsOption = "poisson"
    load_percent: int = DEFAULT_LOAD  # per cent of Noria's capacity, which is measured first
    rows_per_s: float | None = None  # rows a second instead

    def duration_s(self, default_s: float) -> float:
        """Of a run, in a bench whose own is `default_s`."""
        return self.seconds or (FULL_S if self.full else default_s)


def read_duration(text: str) -> float:
    """A run's length in whole seconds, since Locust knows no others; raises ValueError where it is none."""
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= 86400:
        raise ValueError(f"{text!r}; a run lasts 1 to 86400 whole seconds")
    return float(text)


def read_load(text: str) -> int:
    """A per cent of capacity; raises ValueError where it is none."""
    if not text.isascii() or not text.isdecimal() or not 1 <= int(text) <= 1000:
        raise ValueError(f"{text!r}; a load is a whole per cent of Noria's capacity from 1 to 1000")
    return int(text)


def read_rate(text: str) -> float:
    """Rows a second; raises ValueError where it is none."""
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0.1 <= rate <= 1e6:
        raise ValueError(f"{text!r}; a rate is 0.1 to 1000000 rows a second (a guided step of one image has two)")
    return rate
