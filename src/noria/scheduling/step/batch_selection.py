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

from noria.scheduling.shares.fair_width import ReadyImages, SharedImage, split_by_shares
from noria.scheduling.types import BatchKey

# Fraction of the time that a deadline leaves for a step: costs are estimates, and encodes and decodes of other images
# intervene.
_DEADLINE_MARGIN = 0.9


class BatchCandidate(SharedImage, Protocol):
    """The part of an image that `select_batch` reads. Its deadline is on the same clock as `now`."""

    @property
    def calls_left(self) -> float:
        """Model calls until only its decode is left."""


CandidateT = TypeVar("CandidateT", bound=BatchCandidate)


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The limits of one batch key's use of the device."""

    rows_limit: int  # rows of a call: more would not pay off, or not fit
    step_s: Callable[[int], float]  # duration of a call by its rows
    decode_s: float  # seconds of one image
    share: float  # part of the device's time that this batch key gets, 0 to 1
    is_full: bool  # whether every slot is taken
    # How much longer rows beyond their clients' shares may make a call, as a part of it; infinity: clients have none.
    width_slack: float = math.inf


def select_batch(
    images: Sequence[CandidateT], limits: BatchLimits, now: float, ready: ReadyImages | None = None
) -> tuple[list[CandidateT], float]:
    """Select from `images`, given in the policy's order, those that step next.

    Returns them and the longest step that their deadlines allow, which can be infinity. The first image is always
    selected. If the next image needs more rows than are left, a later one that fits takes them: the next image could
    not use them. Where clients share the device, `ready` says whose the images are; rows beyond their shares
    (`fair_width.py`) take what is left if they make the call hardly longer, and nobody too slow.
    """
    if ready is None or len(ready) == 1:
        return _fill([], images, limits, math.inf, now)
    within, beyond, fair_s = split_by_shares(images, ready, limits.rows_limit, limits.step_s)
    rows, chosen, max_step_s = sum([image.rows for image in within]), within, math.inf
    if rows > limits.rows_limit or not limits.is_full:
        chosen, max_step_s = _fill([], within, limits, math.inf, now)
        rows = sum([image.rows for image in chosen])
    if not beyond:
        return chosen, max_step_s
    longest_s = math.inf
    if limits.width_slack < math.inf:
        step_s = limits.step_s(rows)
        longest_s = min((1.0 + limits.width_slack) * step_s, max(fair_s, step_s))
    chosen, _ = _fill(chosen, beyond, limits, min(longest_s, max_step_s), now)
    return chosen, max_step_s


def _fill(
    chosen: list[CandidateT], images: Sequence[CandidateT], limits: BatchLimits, max_step_s: float, now: float
) -> tuple[list[CandidateT], float]:
    """Add those of `images` that fit to `chosen`; return it and the longest step that is allowed."""
    rows = sum([image.rows for image in chosen])
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


def all_fit(rows: int, rows_limit: int, ready: ReadyImages | None, *, is_full: bool) -> bool:
    """Return whether all images step that have `rows` together: whether `select_batch` would select them for sure."""
    return is_full and rows <= rows_limit and (ready is None or len(ready) == 1)


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
