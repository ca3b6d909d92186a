"""What the runs of `noria bench cost` amount to. Pure.

A ratio is *with* over *without*, so 1 is no cost at all and less is a cost: of work a second (rows, since images are of many sizes and
steps), and of work a CPU second of all the server's processes, which a machine that others use troubles less.
"""

import math
import random
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from msgspec import Struct

from noria_bench.measurement.run_metrics import percentile

MIN_THROUGHPUT_RATIO = 0.98  # of the throughput without
MAX_SCRAPE_S = 0.020  # of /metrics at 100 label sets
_NUM_RESAMPLES = 4000
_CPU_TICK_S = 0.01  # in which processes' CPU time is told
_MIN_INCARNATIONS = 5  # of fewer, resamples can say little: the interval of one is a point


class CostRun(Struct, frozen=True):
    """One side of a pair."""

    seconds: float  # from the first request to the last answer
    rows: float
    images: int
    cpu_s: float  # of all the server's processes
    other_cpu_share: float  # of the machine's CPU time, taken by strangers
    views: int = 0  # that the open page was shown
    live_bytes: int = 0
    scrapes_s: tuple[float, ...] = ()
    log_lines: int = 0

    @property
    def rows_per_s(self) -> float:
        """Work a second."""
        return self.rows / self.seconds

    @property
    def rows_per_cpu_s(self) -> float:
        """Work a CPU second."""
        return self.rows / max(self.cpu_s, _CPU_TICK_S)


class Pair(Struct, frozen=True):
    """The same requests on both."""

    incarnation: int  # of the two servers
    bare_first: bool
    instrumented: CostRun  # with metrics, logs, a live page
    bare: CostRun


class ConfidenceInterval(Struct, frozen=True):
    """A middle mean, and what 95 % of bootstrap resamples lie between."""

    mean: float
    low: float
    high: float


def throughput_ratio(pair: Pair) -> float:
    """Of work a second."""
    return pair.instrumented.rows_per_s / pair.bare.rows_per_s


def cpu_ratio(pair: Pair) -> float:
    """Of work a CPU second."""
    return pair.instrumented.rows_per_cpu_s / pair.bare.rows_per_cpu_s


def geometric_midmean(ratios: Sequence[float]) -> float:
    """The geometric mean of the middle half of `ratios`: as little moved by outliers as the median, and steadier."""
    cut = len(ratios) // 4
    logs = sorted(map(math.log, ratios))[cut : len(ratios) - cut]
    return math.exp(statistics.fmean(logs))


def bootstrap_interval(pairs: Sequence[Pair], ratio: Callable[[Pair], float], seed: int = 1) -> ConfidenceInterval:
    """The middle mean with its bootstrap percentile interval; lives are resampled whole, since the pairs of one have its luck in common."""
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
    """Whether the mean keeps what was asked for, and whether the interval leaves a doubt."""
    result = "met" if interval.mean >= MIN_THROUGHPUT_RATIO else "missed"
    return (
        result
        if interval.low >= MIN_THROUGHPUT_RATIO or interval.high < MIN_THROUGHPUT_RATIO
        else f"{result}, within the noise"
    )


def summarise(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Ratios, their intervals, the verdict; empty without a pair."""
    if not pairs:
        return {}
    throughput, cpu = bootstrap_interval(pairs, throughput_ratio), bootstrap_interval(pairs, cpu_ratio)
    runs = {"with": [pair.instrumented for pair in pairs], "without": [pair.bare for pair in pairs]}
    num_incarnations = len({pair.incarnation for pair in pairs})
    return {
        "pairs": len(pairs),
        "lives": num_incarnations,
        "throughput_ratio": {name: getattr(throughput, name) for name in ConfidenceInterval.__struct_fields__},
        "work_per_cpu_s_ratio": {name: getattr(cpu, name) for name in ConfidenceInterval.__struct_fields__},
        "images_per_s": {
            side: statistics.median(run.images / run.seconds for run in each) for side, each in runs.items()
        },
        "cpu_s_per_image": {
            side: statistics.median(run.cpu_s / run.images for run in each) for side, each in runs.items()
        },
        "verdict": verdict(throughput)
        if num_incarnations >= _MIN_INCARNATIONS
        else f"{verdict(throughput)}, but of too few lives of the servers",
    }


def pair_line(pair: Pair) -> str:
    """A pair in a few words."""
    with_s, without_s = pair.instrumented.seconds, pair.bare.seconds
    return (
        f"{pair.instrumented.images} images in {with_s:.1f} s with, {without_s:.1f} s without; ratio of work a second {throughput_ratio(pair):.3f}, "
        f"a CPU second {cpu_ratio(pair):.3f}; others took {max(pair.instrumented.other_cpu_share, pair.bare.other_cpu_share):.0%}"
    )


def tables(document: dict[str, Any]) -> str:
    """The document as Markdown."""
    summary, machine = document["summary"], document["machine"]
    lines = []
    if summary:
        lines += [
            f"| {' and '.join(document['options']['parts']) or 'two equal servers'} | without | with | ratio (95 %) |",
            "|---|---|---|---|",
        ]
        images, cpu = summary["images_per_s"], summary["cpu_s_per_image"]
        lines.append(f"| images/s | {images['without']:.2f} | {images['with']:.2f} | |")
        lines.append(f"| CPU seconds an image | {cpu['without']:.3f} | {cpu['with']:.3f} | |")
        for name, label in (("throughput_ratio", "work a second"), ("work_per_cpu_s_ratio", "work a CPU second")):
            row = summary[name]
            lines.append(f"| {label} | | | {row['mean']:.3f} ({row['low']:.3f}–{row['high']:.3f}) |")
        lines += [
            "",
            f"Pairs: {summary['pairs']}; lives of the servers: {summary['lives']}. At least {MIN_THROUGHPUT_RATIO} of the work a second was asked for: "
            f"{summary['verdict']}.",
            "",
        ]
    if document["scrapes"]:
        lines += ["| /metrics at 100 label sets | best, ms | median, ms | worst, ms | |", "|---|---|---|---|---|"]
        for row in document["scrapes"]:
            best, median, worst = (1000 * row[name] for name in ("best_s", "median_s", "worst_s"))
            verdict = "met" if row["median_s"] <= MAX_SCRAPE_S else "missed"
            lines.append(
                f"| {row['words']}, {row['bytes'] / 1000:.0f} kB | {best:.1f} | {median:.1f} | {worst:.1f} | {verdict} |"
            )
        lines.append("")
    lines.append(
        f"{machine['cores']} cores of {machine['cpu']}, noria {document['noria']} at {document['commit']}, {document['date'][:10]}; load before "
        f"{machine['load_average_before']:.1f}." + ("" if document["complete"] else " Interrupted: incomplete.")
    )
    return "\n".join(lines)
