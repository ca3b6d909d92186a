"""Options of `noria bench scenario1`, `scenario2`, `mixed` and `sweep`. Imports little: the command line reads it."""

from dataclasses import dataclass
from typing import Literal, get_args

from noria_bench.targets.catalog import Target, read_targets

ArrivalsOption = Literal["poisson", "bursty", "both"]
ARRIVALS: tuple[ArrivalsOption, ...] = get_args(ArrivalsOption)
SWEEPS = ("attention", "channels-last", "dtype", "compile", "batching", "slots", "policy")
# `all` leaves it out: it needs the frameworks installed.
FRAMEWORKS_SWEEP = "frameworks"
# The reference article's 15 minutes.
FULL_S = 900.0
QUICK_S = 15.0
# What differs among the requests of a closed loop.
CLOSED_MIXES = ("settings", "uniform", "sizes", "start-images", "loras")


@dataclass(frozen=True)
class SuiteOptions:
    """Options of the benches that compare targets; only `mixed` reads those after `seed`."""

    targets: tuple[Target, ...] = read_targets("noria,reference-batched")
    seconds: float | None = None  # length of each run; None: the bench's default
    full: bool = False  # runs of 15 minutes unless `seconds` is set, and complete grids
    quick: bool = False  # runs of 15 seconds unless `seconds` is set
    seed: int = 1  # seed of the requests
    arrivals: ArrivalsOption = "poisson"
    load_percents: tuple[int, ...] = (80,)  # shares of Noria's capacity, which is measured first
    rows_per_s: float | None = None  # the arriving work, instead of loads
    num_users: int | None = None  # in a closed loop, instead of arrivals
    mixes: tuple[str, ...] = CLOSED_MIXES  # kinds of traffic in a closed loop

    def duration_s(self, default_s: float) -> float:
        """Seconds of a run in a bench whose default is `default_s`."""
        return self.seconds or (FULL_S if self.full else QUICK_S if self.quick else default_s)
