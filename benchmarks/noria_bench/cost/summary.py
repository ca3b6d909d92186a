"""The summary of the runs of `noria bench cost`. Pure.

A ratio is *with* over *without*: 1 is no cost, less is a cost. There is one of work per second (in rows, since images
have many sizes and steps), and one of work per CPU second of all the server's processes, which other load on the
machine affects less.
"""

import math
import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import asdict

from noria_bench.measurement.run_metrics import percentile
from noria_bench.reports.provenance_text import result_line
from noria_bench.reports.table import Table, format_number

# The goals.
MIN_THROUGHPUT_RATIO = 0.98
MAX_SCRAPE_S = 0.020
_NUM_RESAMPLES = 4000
# The resolution of processes' CPU times.
_CPU_TICK_S = 0.01
# Bootstrap intervals of fewer groups are too narrow: that of one is a point.
_MIN_INCARNATIONS = 5


class CostRun(Struct, frozen=True):
    """The measurements of one side of a pair."""

    seconds: float  # from the first request to the last answer
    rows: float
    images: int
    cpu_s: float  # CPU time of all the server's processes
    other_cpu_share: float  # share of the machine's CPU time, used by other processes
    views: int = 0  # that the open page received
    scrapes_s: tuple[float, ...] = ()

    @property
    def rows_per_s(self) -> float:
        """Work per second."""
        return self.rows / self.seconds

    @property
    def rows_per_cpu_s(self) -> float:
        """Work per CPU second."""
        return self.rows / max(self.cpu_s, _CPU_TICK_S)


class Pair(Struct, frozen=True):
    """The same requests on both servers."""

    incarnation: int  # counts restarts of both servers
    bare_first: bool
    instrumented: CostRun  # with the measured features
    bare: CostRun


class ConfidenceInterval(Struct, frozen=True):
    """A mean with its 95 % bootstrap interval."""

    mean: float
    low: float
    high: float


def throughput_ratio(pair: Pair) -> float:
    """The ratio of work per second."""
    return pair.instrumented.rows_per_s / pair.bare.rows_per_s


def cpu_ratio(pair: Pair) -> float:
    """The ratio of work per CPU second."""
    return pair.instrumented.rows_per_cpu_s / pair.bare.rows_per_cpu_s


def geometric_midmean(ratios: Sequence[float]) -> float:
    """The geometric mean of the middle half of `ratios`: as robust as the median, with less variance."""
    cut = len(ratios) // 4
    logs = sorted(map(math.log, ratios))[cut : len(ratios) - cut]
    return math.exp(statistics.fmean(logs))


def bootstrap_interval(pairs: Sequence[Pair], ratio: Callable[[Pair], float], seed: int = 1) -> ConfidenceInterval:
    """The midmean with its bootstrap percentile interval.

    Whole incarnations are resampled, since their pairs are correlated.
    """
    incarnations: dict[int, list[float]] = {}
    for pair in pairs:
        incarnations.setdefault(pair.incarnation, []).append(ratio(pair))
    rng, groups = random.Random(seed), list(incarnations.values())
    means = [
        geometric_midmean([value for ratios in rng.choices(groups, k=len(groups)) for value in ratios])
        for _ in range(_NUM_RESAMPLES)
    ]
    return ConfidenceInterval(
        geometric_midmean([ratio(pair) for pair in pairs]), percentile(means, 0.025), percentile(means, 0.975)
    )


def verdict(interval: ConfidenceInterval) -> str:
    """Whether the mean meets the goal, and whether the interval contains the goal."""
    result = "met" if interval.mean >= MIN_THROUGHPUT_RATIO else "missed"
    return (
        result
        if interval.low >= MIN_THROUGHPUT_RATIO or interval.high < MIN_THROUGHPUT_RATIO
        else f"{result}, within the noise"
    )


def summarise(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Ratios with their intervals, and the verdict; empty without pairs."""
    if not pairs:
        return {}
    throughput, cpu = bootstrap_interval(pairs, throughput_ratio), bootstrap_interval(pairs, cpu_ratio)
    runs = {"with": [pair.instrumented for pair in pairs], "without": [pair.bare for pair in pairs]}
    num_incarnations = len({pair.incarnation for pair in pairs})
    return {
        "pairs": len(pairs),
        "incarnations": num_incarnations,
        "throughput_ratio": asdict(throughput),
        "work_per_cpu_s_ratio": asdict(cpu),
        "images_per_s": {
            side: statistics.median(run.images / run.seconds for run in each) for side, each in runs.items()
        },
        "cpu_s_per_image": {
            side: statistics.median(run.cpu_s / run.images for run in each) for side, each in runs.items()
        },
        "verdict": verdict(throughput)
        if num_incarnations >= _MIN_INCARNATIONS
        else f"{verdict(throughput)}, with too few restarts of the servers",
    }


def pair_line(pair: Pair) -> str:
    """A pair as one line, for status messages."""
    with_s, without_s = pair.instrumented.seconds, pair.bare.seconds
    return (
        f"{pair.instrumented.images} images in {with_s:.1f} s with, {without_s:.1f} s without; "
        f"ratio of work per second {throughput_ratio(pair):.3f}, per CPU second {cpu_ratio(pair):.3f}; "
        f"other processes used {max(pair.instrumented.other_cpu_share, pair.bare.other_cpu_share):.0%}"
    )


def tables(document: dict[str, Any]) -> str:
    """The results as Markdown tables."""
    summary, found = document["summary"], list[str]()
    if summary:
        images, cpu = summary["images_per_s"], summary["cpu_s_per_image"]
        rows = [
            ("images/s", format_number(images["without"], 2), format_number(images["with"], 2), ""),
            ("CPU seconds per image", format_number(cpu["without"], 3), format_number(cpu["with"], 3), ""),
        ]
        for name, label in (("throughput_ratio", "work per second"), ("work_per_cpu_s_ratio", "work per CPU second")):
            ratio = summary[name]
            rows.append((label, "", "", f"{ratio['mean']:.3f} ({ratio['low']:.3f}–{ratio['high']:.3f})"))
        features = " and ".join(document["options"]["features"]) or "two equal servers"
        note = (
            f"Pairs: {summary['pairs']}; starts of both servers: {summary['incarnations']}. "
            f"Goal, at least {MIN_THROUGHPUT_RATIO} of the work per second: {summary['verdict']}."
        )
        found.append(Table("Cost", (features, "without", "with", "ratio (95 %)"), tuple(rows), (note,)).markdown())
    if document["scrapes"]:
        scrapes = tuple(
            (
                f"{row['description']}, {row['bytes'] / 1000:.0f} kB",
                *(format_number(1000 * row[name], 1) for name in ("best_s", "median_s", "worst_s")),
                "met" if row["median_s"] <= MAX_SCRAPE_S else "missed",
            )
            for row in document["scrapes"]
        )
        columns = ("/metrics at 100 label sets", "best, ms", "median, ms", "worst, ms", "")
        found.append(Table("Scrapes", columns, scrapes).markdown())
    found.append(result_line(document) + ("" if document["complete"] else " Interrupted: incomplete."))
    return "\n\n".join(found)
