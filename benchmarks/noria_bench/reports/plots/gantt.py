"""Requests as bars in time: the lane of each, and the number of images in generation. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from noria_bench.measurement.run_metrics import RequestRecord
from noria_bench.measurement.runs import BenchRun

# Enough for a few batches of a slow server, and short enough for visible bars.
_WINDOW_S = 15.0


@dataclass(frozen=True)
class Bar:
    """A request from its sending to its end; times are seconds from the run's start."""

    start_s: float
    generation_start_s: float  # equals start_s if the server does not report queue times
    end_s: float  # the window's end if there was no answer
    lane: int
    num_images: int
    failed: bool
    queue_time_known: bool  # whether the server reported the queue time


def window_of(run: BenchRun, window_s: float = _WINDOW_S) -> tuple[float, float]:
    """The middle `window_s` of the run, or all of a shorter one."""
    seconds = run.duration_s or run.traffic.seconds
    begin = max(0.0, (seconds - window_s) / 2)
    return begin, min(begin + window_s, seconds)


def bars_of(
    records: Sequence[RequestRecord], begin_s: float, end_s: float, *, reports_queue_time: bool = True
) -> list[Bar]:
    """The bars that touch the window, each in the first lane that is free at its start.

    `reports_queue_time` is the target's.
    """
    free_at: list[float] = []
    bars = []
    for record in sorted(records, key=lambda record: (record.sent_s, record.number)):
        ended = end_s if record.done_s is None else record.done_s
        if ended <= begin_s or record.sent_s >= end_s:
            continue
        lane = next((k for k, free_s in enumerate(free_at) if free_s <= record.sent_s), len(free_at))
        free_at[lane : lane + 1] = [ended]
        failed = math.isinf(record.latency_s)
        queue_time_known = reports_queue_time and record.queue_s is not None and not failed
        generation_start_s = min(record.sent_s + (record.queue_s or 0.0), ended) if queue_time_known else record.sent_s
        bars.append(Bar(record.sent_s, generation_start_s, ended, lane, record.num_images, failed, queue_time_known))
    return bars


def images_in_generation(bars: Sequence[Bar], begin_s: float, end_s: float) -> tuple[list[float], list[int]]:
    """Images in generation over time: the moments at which their number changes, and the number from then on."""
    changes: dict[float, int] = {begin_s: 0, end_s: 0}
    for bar in bars:
        if bar.failed:
            continue
        # Rounded, so that the images of a batch end at one moment.
        first = round(max(bar.generation_start_s, begin_s), 3)
        last = round(min(bar.end_s, end_s), 3)
        if first < last:
            changes[first] = changes.get(first, 0) + bar.num_images
            changes[last] = changes.get(last, 0) - bar.num_images
    moments, counts, num_images = sorted(changes), [], 0
    for moment in moments:
        num_images += changes[moment]
        counts.append(num_images)
    # The window ends, not the generation.
    counts[-1] = counts[-2] if len(counts) > 1 else 0
    return moments, counts
