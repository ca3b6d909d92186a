"""Selects which running images are evicted: those that would step last, for waiting ones that would step earlier.

So the images with slots are always the first in the policy's order, and none waits for a departure that others would
not have to wait for. Keys do not change their order, so an evicted image is back only when it is among the first again:
each arrival evicts at most as many images as it has.

The image that is evicted waits at its call; what is saved of it is the executor's matter. Images whose decode alone is
left stay, since they leave next. Nothing is evicted beside an exclusive request, which runs alone, or while the
device's memory takes fewer images than there are slots: a slot that is free then is not one that can be used.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter

from noria.scheduling.step.predictor import CompletionPredictor, OrderKey
from noria.scheduling.step.request_table import RunningImage
from noria.scheduling.types import ItemId

MAX_EVICTIONS = 8
"""In an iteration: the state of one image is 0.1 to 10 MB, so 8 delay the others by a few milliseconds."""
# A key takes a microsecond. Those of running images change only where a deadline becomes infeasible, or costs change.
_KEY_REFRESH_INTERVAL = 16  # plans


@dataclass(slots=True)
class EvictionSelector:
    """Selects among the running images of the table of `predictor`."""

    predictor: CompletionPredictor
    _max_key: OrderKey = field(init=False, default=(-math.inf, 0.0))  # the largest of the running images, or more
    _num_plans: int = field(init=False, default=0)

    def may_evict(self) -> bool:
        """Whether the first waiting image may step earlier than a running one; `find` finds out."""
        self._num_plans += 1
        if self._num_plans % _KEY_REFRESH_INTERVAL == 0 or self.predictor.table.queue.unranked:
            return True
        return next(iter(self.predictor.table.queue)).rank[:2] < self._max_key

    def find(self, now: float) -> list[tuple[OrderKey, RunningImage]]:
        """Return the running images that can be evicted with their keys, those that would step last first.

        Only those that would step after the first waiting one, of a queue that is not empty.
        """
        predictor, table = self.predictor, self.predictor.table
        num, first_key = min(MAX_EVICTIONS, table.num_evictable), next(iter(table.queue)).rank[:2]
        if num == 0 or predictor.max_running < table.num_slots or not table.running:
            return []
        keys = predictor.policy_keys(table.running.values(), now)
        self._max_key = max(keys.values())
        found = [
            (keys[running.image], running)
            for running in reversed(table.running.values())  # with equal keys, the last one to join steps last
            if keys[running.image] > first_key and not running.is_denoised and not running.request.exclusive
        ]
        return sorted(found, key=itemgetter(0), reverse=True)[:num]

    def select(
        self, joining: Sequence[ItemId], evictable: Sequence[tuple[OrderKey, RunningImage]], now: float
    ) -> list[ItemId]:
        """Return those of `evictable` whose slots `joining` take, in order, as long as these would step earlier."""
        evicted: list[ItemId] = []
        for image, (key, running) in zip(joining, evictable, strict=False):
            active = self.predictor.table.requests[image.attempt_id]
            turn = active.turn(image.index)
            if (self.predictor.waiting_key(active, image.index, now), turn.virtual_finish) >= key:
                break
            evicted.append(running.image)
        return evicted

    def on_join(self, images: Iterable[ItemId]) -> None:
        """Record that waiting images join, while they have their ranks."""
        requests = self.predictor.table.requests
        ranks = [requests[image.attempt_id].ranks[image.index] for image in images]
        self._max_key = max([self._max_key, *[rank[:2] for rank in ranks]])

    def on_out_of_memory(self, max_evicted: int) -> None:
        """Record that the host's memory does not fit more; all images that had to be evicted have slots again."""
        self.predictor.table.max_evicted, self._max_key = max_evicted, (math.inf, 0.0)
