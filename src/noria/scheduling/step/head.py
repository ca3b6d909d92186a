"""The head of the order: the images that a forecast simulates; those behind are extrapolated.

A simulation takes as long as the number of its images times that of departures. Paused images cost nothing, with a slot
or without: so of hundreds of images, only those that step soon have slots in the simulation, and some more wait.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from noria.scheduling.costs import CostModel
from noria.scheduling.step.forecast import Forecast, HeadForecast
from noria.scheduling.step.request_table import RequestTable
from noria.scheduling.types import BatchKey, ItemId

_MIN_SLOTS = 32  # in a simulation of more images
_CALLS = 1.5  # full calls of each key, whose images have slots: deadlines and shares change a little who steps next


class ImageWork(NamedTuple):
    """An image behind the head."""

    image: ItemId
    has_slot: bool
    work_s: float  # device time of what is left of it, in full batches, at a slowdown of 1


class Head(NamedTuple):
    """The images to simulate with `num_slots` slots, and those behind, both in order."""

    images: Sequence[ItemId]
    num_slots: int
    behind: Sequence[ImageWork] = ()

    def extrapolate(self, simulated: HeadForecast) -> HeadForecast:
        """Return the forecast of all images: each one behind steps when the work ahead of it is done.

        The end is that of all their work.
        """
        images, end_in_s = dict(simulated.images), simulated.end_in_s
        for each in self.behind:
            finish_in_s = end_in_s + simulated.pace * self.num_slots * each.work_s
            images[each.image] = Forecast(0.0 if each.has_slot else end_in_s, finish_in_s)
            end_in_s += simulated.pace * each.work_s
        return HeadForecast(images, end_in_s, simulated.pace)


def choose_head(
    in_order: Sequence[ItemId], table: RequestTable, costs: CostModel, num_slots: int, num_waiting: int
) -> Head:
    """Return the head of `in_order`: images for the slots that the next calls need, and `num_waiting` more.

    Images that are denoised are in it, too: they leave soon. All images are, if they are not many more.
    """
    if len(in_order) <= _MIN_SLOTS + num_waiting:
        return Head(in_order, num_slots)
    num_slots = min(_slots_needed(in_order, table, costs), num_slots)
    first, running = num_slots + num_waiting, table.running
    head, behind = list(in_order[:first]), list[ImageWork]()
    for image in in_order[first:]:
        if image in running and running[image].is_denoised:
            head.append(image)
        else:
            active = table.requests[image.attempt_id]
            left = 1 - table.next_call(image) / active.request.num_calls
            behind.append(ImageWork(image, image in running, left * active.image_work_s))
    return Head(head, num_slots, behind)


def _slots_needed(in_order: Sequence[ItemId], table: RequestTable, costs: CostModel) -> int:
    images, rows = Counter[BatchKey](), Counter[BatchKey]()
    for image in in_order:
        request = table.request_of(image)
        images[request.batch_key] += 1
        rows[request.batch_key] += request.rows
    needed = [
        min(num, math.ceil(_CALLS * costs.rows_limit(batch_key) * num / rows[batch_key]))
        for batch_key, num in images.items()
    ]
    return max(sum(needed), _MIN_SLOTS)
