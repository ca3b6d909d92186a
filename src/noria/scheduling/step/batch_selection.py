"""Selects which images of one batch key step together: as many as pay off and, while slots are free, deadlines allow.

Also says of which requests start images and references are encoded together.

A larger batch generates more images per second and takes longer for each of them. While slots are free there is spare
time, so the batch stays small enough for the most urgent image in it; the others are paused and catch up later. Once
all slots are taken, throughput goes first, because the queue would grow without bound otherwise; requests that need
small batches are then rejected at admission.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from noria.scheduling.types import BatchKey

# Fraction of the time that a deadline leaves for a step: costs are estimates, and encodes and decodes of other images
# intervene.
_DEADLINE_MARGIN = 0.9


class BatchCandidate(Protocol):
    """What `select_batch` reads of an image."""

    @property
    def rows(self) -> int:
        """Rows of it in a model call."""
        ...

    @property
    def calls_left(self) -> float:
        """Model calls until only its decode is left."""
        ...

    @property
    def deadline_s(self) -> float | None:
        """Its deadline, on the same clock as `now`; None: no deadline."""
        ...


CandidateT = TypeVar("CandidateT", bound=BatchCandidate)


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What one batch key may use of the device."""

    rows_limit: int  # of a call: more would not pay off, or not fit
    step_s: Callable[[int], float]  # duration of a call by its rows
    decode_s: float  # of one image
    share: float  # of the device's time that this batch key gets, 0 to 1
    is_full: bool  # whether every slot is taken


def select_batch(images: Sequence[CandidateT], limits: BatchLimits, now: float) -> tuple[list[CandidateT], float]:
    """Select from `images`, given in the policy's order, those that step next.

    Returns them and the longest step that their deadlines allow, which can be infinity. The first image is always
    selected. If the next image needs more rows than are left, a later one that fits takes them: the next image could
    not use them.
    """
    chosen: list[CandidateT] = []
    rows, max_step_s = 0, math.inf
    for image in images:
        if chosen and rows + image.rows > limits.rows_limit:
            if rows >= limits.rows_limit:
                break
            continue
        if max_step_s < math.inf and limits.step_s(rows + image.rows) > max_step_s:
            break  # any further image would lengthen the step, too
        chosen.append(image)
        rows += image.rows
        if not limits.is_full:
            max_step_s = min(max_step_s, _affordable_step_s(image, limits, now))
    return chosen, max_step_s


def all_fit(rows: int, rows_limit: int, *, is_full: bool) -> bool:
    """Return whether all images step that have `rows` together: whether `select_batch` would select all of them."""
    return is_full and rows <= rows_limit


def can_encode(batch_key: BatchKey, encodes: Sequence[BatchKey], max_images: int) -> bool:
    """Return whether an iteration that encodes the images of requests of keys `encodes` can encode another's with them.

    It encodes those of one batch key, at most `max_images` of the size of its images, and at least one request's.
    """
    if not encodes:
        return True
    per_request = max(1, math.ceil(batch_key.reference_px / (batch_key.width_px * batch_key.height_px)))
    return encodes[0] == batch_key and (len(encodes) + 1) * per_request <= max_images


def _affordable_step_s(image: BatchCandidate, limits: BatchLimits, now: float) -> float:
    """Maximum duration of each remaining step; infinity without a deadline, or if it cannot be met even alone."""
    if image.deadline_s is None or image.calls_left <= 0:
        return math.inf
    each_s = (image.deadline_s - now - limits.decode_s) / image.calls_left * limits.share
    return _DEADLINE_MARGIN * each_s if each_s >= limits.step_s(image.rows) else math.inf
