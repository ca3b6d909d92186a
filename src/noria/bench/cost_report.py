"""What the runs of `noria bench cost` amount to. Pure.

A ratio is *with* over *without*, so 1 is no cost at all and less is a cost: of work a second (rows, since images are of many sizes and
steps), and of work a CPU second of all the server's processes, which a machine that others use troubles less.
"""

import random
import statistics
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from noria.bench.statistics import percentile

LEAST_RATIO = 0.98  # of the throughput without
MOST_SCRAPE_S = 0.020  # of /metrics at 100 label sets
_RESAMPLES = 10_000
_FEWEST_PAIRS = 6  # of fewer, resamples can say little: the interval of one is a point


class CostRun(Struct, frozen=True):
    """One side of a pair."""

    rows_per_s: float
    images_per_s: float
    cpu_s: float  # of all the server's processes
    rows: float  # all that was drawn meanwhile
    images: int
    failures: int
    others_share: float  # of the machine's CPU time, taken by strangers
    views: int = 0  # that the open page was shown
    live_bytes: int = 0
    scrapes_s: tuple[float, ...] = ()
    log_lines: int = 0


class Pair(Struct, frozen=True):
    """The same load on both."""

    bare_first: bool
    watched: CostRun  # with metrics, logs, a live page
    bare: CostRun


class Interval(Struct, frozen=True):
    """A median and what 95 % of bootstrap resamples lie between."""

    median: float
    low: float
    high: float


def throughput_ratios(pairs: Sequence[Pair]) -> list[float]:
    """Work a second, of each pair."""
    return [pair.watched.rows_per_s / pair.bare.rows_per_s for pair in pairs]


def cpu_ratios(pairs: Sequence[Pair]) -> list[float]:
    """Work a CPU second, of each pair."""
    return [(pair.watched.rows / pair.watched.cpu_s) / (pair.bare.rows / pair.bare.cpu_s) for pair in pairs]


def interval(values: Sequence[float], seed: int = 1) -> Interval:
    """The median of `values` with its bootstrap percentile interval."""
    dice = random.Random(seed)  # noqa: S311 - to be repeated, not to be secret
    medians = [statistics.median(dice.choices(values, k=len(values))) for _ in range(_RESAMPLES)]
    return Interval(statistics.median(values), percentile(medians, 0.025), percentile(medians, 0.975))


def verdict(found: Interval) -> str:
    """Whether the median keeps what was asked for, and whether the interval leaves a doubt."""
    word = "met" if found.median >= LEAST_RATIO else "missed"
    return word if found.low >= LEAST_RATIO or found.high < LEAST_RATIO else f"{word}, within the noise"


def summarise(pairs: Sequence[Pair]) -> dict[str, Any]:
    """Ratios, their intervals, the verdict; empty without a pair."""
    if not pairs:
        return {}
    throughput, cpu = interval(throughput_ratios(pairs)), interval(cpu_ratios(pairs))
    runs = {"with": [pair.watched for pair in pairs], "without": [pair.bare for pair in pairs]}
    return {
        "pairs": len(pairs),
        "throughput_ratio": {name: getattr(throughput, name) for name in Interval.__struct_fields__},
        "work_per_cpu_s_ratio": {name: getattr(cpu, name) for name in Interval.__struct_fields__},
        "images_per_s": {side: statistics.median(run.images_per_s for run in each) for side, each in runs.items()},
        "cpu_s_per_image": {
            side: statistics.median(run.cpu_s / run.images for run in each) for side, each in runs.items()
        },
        "failures": sum(run.failures for each in runs.values() for run in each),
        "verdict": verdict(throughput)
        if len(pairs) >= _FEWEST_PAIRS
        else f"{verdict(throughput)}, but of too few pairs",
    }


def line(pair: Pair) -> str:
    """A pair in a few words."""
    (throughput,), (cpu,) = throughput_ratios([pair]), cpu_ratios([pair])
    return (
        f"{pair.watched.images_per_s:.2f} images/s with, {pair.bare.images_per_s:.2f} without; ratio of work a second {throughput:.3f}, "
        f"a CPU second {cpu:.3f}; others took {max(pair.watched.others_share, pair.bare.others_share):.0%}"
    )


def tables(document: dict[str, Any]) -> str:
    """The document as Markdown."""
    summary, machine = document["summary"], document["machine"]
    lines = []
    if summary:
        lines += [
            f"| {' and '.join(document['options']['parts'])} | without | with | ratio (95 %) |",
            "|---|---|---|---|",
        ]
        images, cpu = summary["images_per_s"], summary["cpu_s_per_image"]
        lines.append(f"| images/s | {images['without']:.2f} | {images['with']:.2f} | |")
        lines.append(f"| CPU seconds an image | {cpu['without']:.3f} | {cpu['with']:.3f} | |")
        for name, words in (("throughput_ratio", "work a second"), ("work_per_cpu_s_ratio", "work a CPU second")):
            found = summary[name]
            lines.append(f"| {words} | | | {found['median']:.3f} ({found['low']:.3f}–{found['high']:.3f}) |")
        lines += [
            "",
            f"{summary['pairs']} pairs; at least {LEAST_RATIO} of the work a second was asked for: {summary['verdict']}. Failures: {summary['failures']}.",
            "",
        ]
    if document["scrapes"]:
        lines += ["| /metrics at 100 label sets | best, ms | median, ms | worst, ms | |", "|---|---|---|---|---|"]
        for found in document["scrapes"]:
            best, median, worst = (1000 * found[name] for name in ("best_s", "median_s", "worst_s"))
            kept = "met" if found["median_s"] <= MOST_SCRAPE_S else "missed"
            lines.append(
                f"| {found['words']}, {found['bytes'] / 1000:.0f} kB | {best:.1f} | {median:.1f} | {worst:.1f} | {kept} |"
            )
        lines.append("")
    lines.append(
        f"{machine['cores']} cores of {machine['cpu']}, noria {document['noria']} at {document['commit']}, {document['date'][:10]}; load before "
        f"{machine['load_average_before']:.1f}." + ("" if document["complete"] else " Interrupted: incomplete.")
    )
    return "\n".join(lines)
