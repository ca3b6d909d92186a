"""Whose turn it is, when images of several shape classes (models, sizes) are seated: only one class can step in a turn.

The rule: the class of the most urgent image steps, as long as no other class is owed more than half a second of the device; else the
class that is owed most. A class is owed what the urgent one has had in excess of it, the shares being in proportion to the images
seated. So urgency decides over instants, fairness over seconds, and no class starves another however urgent or slow it is: while the same
images are seated, a class has its share of the device but for half a second and one turn of each class.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from noria.scheduling.types import BatchKey

_MAX_OWED_S = 0.5


@dataclass(slots=True)
class StrideScheduler:
    """What each class has used of the device, in seconds for each image that it had seated (stride scheduling, Waldspurger 1995)."""

    _used_s: dict[BatchKey, float] = field(default_factory=dict)

    def next(self, num_running: Mapping[BatchKey, int], urgent: BatchKey) -> BatchKey:
        """The class to step, of those in `num_seated`; `urgent` is the most urgent image's."""
        min_used_s = min(
            (self._used_s[batch_key] for batch_key in num_running if batch_key in self._used_s), default=0.0
        )
        # Who comes anew, or again, starts level: nothing is saved up while away.
        self._used_s = {batch_key: self._used_s.get(batch_key, min_used_s) for batch_key in num_running}
        owed_s = {
            batch_key: (self._used_s[urgent] - self._used_s[batch_key]) * num for batch_key, num in num_running.items()
        }
        most_owed = max(owed_s, key=lambda batch_key: owed_s[batch_key])
        return most_owed if owed_s[most_owed] > _MAX_OWED_S else urgent

    def charge(self, batch_key: BatchKey, seconds: float, num_running: int) -> None:
        """`shape` steps for `seconds`."""
        self._used_s[batch_key] += seconds / num_running
