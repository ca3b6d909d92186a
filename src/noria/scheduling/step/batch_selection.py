"""Which images of one shape class step together: as many as pay, but, while slots are free, not so many that a deadline is missed.

A larger batch draws more images a second and takes every one of them longer. While the wheel is not full there is time to spare, and
the batch stays small enough for the most urgent in it: the others are paused, and catch up later. Once it is full, throughput goes
first, or the queue would grow for good; who needs small batches then is refused at the door.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

_DEADLINE_MARGIN = (
    0.9  # of what a deadline leaves for a step: costs are estimates, and newcomers are decoded and encoded meanwhile
)


class BatchCandidate(Protocol):
    """What is asked of an image."""

    rows: int
    calls_left: float
    deadline_s: float | None  # on the same clock as `now`; None: whenever it is done


CandidateT = TypeVar("CandidateT", bound=BatchCandidate)


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What a class may use of the device."""

    rows_limit: int  # of a call: more would not pay, or not fit
    step_s: Callable[[int], float]  # a call, by its rows
    decode_s: float  # of one image
    share: float  # of the device's time that is this class's, 0 to 1
    is_full: bool  # whether every slot is taken


def select_batch(images: Sequence[CandidateT], limits: BatchLimits, now: float) -> tuple[list[CandidateT], float]:
    """Those of `images`, which come in the policy's order, that step next; and the longest step that they can afford, infinity at most.

    The first always steps. Room that is too small for whoever comes next goes to somebody behind who fits: it is of no use to the other.
    """
    chosen: list[CandidateT] = []
    rows, max_step_s = 0, math.inf
    for image in images:
        if chosen and rows + image.rows > limits.rows_limit:
            if rows >= limits.rows_limit:
                break
            continue
        if chosen and limits.step_s(rows + image.rows) > max_step_s:
            break  # whoever comes behind would make it longer, too
        chosen.append(image)
        rows += image.rows
        if not limits.is_full:
            max_step_s = min(max_step_s, _affordable_step_s(image, limits, now))
    return chosen, max_step_s


def _affordable_step_s(image: BatchCandidate, limits: BatchLimits, now: float) -> float:
    """How long each of the steps that are left to `image` may take; infinity if it has no deadline, or cannot be in time even alone."""
    if image.deadline_s is None or image.calls_left <= 0:
        return math.inf
    each_s = (image.deadline_s - now - limits.decode_s) / image.calls_left * limits.share
    return _DEADLINE_MARGIN * each_s if each_s >= limits.step_s(image.rows) else math.inf
