"""Which images of one shape class step together: as many as pay, but, while slots are free, not so many that a deadline is missed.

A larger batch draws more images a second and takes every one of them longer. While the wheel is not full there is time to spare, and
the batch stays small enough for the most urgent in it: the others are paused, and catch up later. Once it is full, throughput goes
first, or the queue would grow for good; who needs small batches then is refused at the door.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

_MARGIN = (
    0.9  # of what a deadline leaves for a step: costs are estimates, and newcomers are decoded and encoded meanwhile
)


class Boarded(Protocol):
    """What is asked of an image."""

    rows: int
    calls_left: float
    due_s: float | None  # on the same clock as `now`; None: whenever it is done


B = TypeVar("B", bound=Boarded)


@dataclass(frozen=True, slots=True)
class Device:
    """What a class may use of the device."""

    rows_limit: int  # of a call: more would not pay, or not fit
    step_s: Callable[[int], float]  # a call, by its rows
    decode_s: float  # of one image
    share: float  # of the device's time that is this class's, 0 to 1
    is_full: bool  # whether every slot is taken


def together(images: Sequence[B], device: Device, now: float) -> tuple[list[B], float]:
    """Those of `images`, which come in the policy's order, that step next; and the longest step that they can afford, infinity at most.

    The first always steps. Room that is too small for whoever comes next goes to somebody behind who fits: it is of no use to the other.
    """
    chosen: list[B] = []
    rows, longest_s = 0, math.inf
    for image in images:
        if chosen and rows + image.rows > device.rows_limit:
            if rows >= device.rows_limit:
                break
            continue
        if chosen and device.step_s(rows + image.rows) > longest_s:
            break  # whoever comes behind would make it longer, too
        chosen.append(image)
        rows += image.rows
        if not device.is_full:
            longest_s = min(longest_s, _affordable_s(image, device, now))
    return chosen, longest_s


def _affordable_s(image: Boarded, device: Device, now: float) -> float:
    """How long each of the steps that are left to `image` may take; infinity if it has no deadline, or cannot be in time even alone."""
    if image.due_s is None or image.calls_left <= 0:
        return math.inf
    each_s = (image.due_s - now - device.decode_s) / image.calls_left * device.share
    return _MARGIN * each_s if each_s >= device.step_s(image.rows) else math.inf
