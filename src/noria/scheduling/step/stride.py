"""Selects the batch key (model and size) of an iteration, which steps images of one key only, by stride scheduling.

The key of the most urgent image is selected, unless a key is owed more than half a second of device time; then the key
that is furthest behind per image is selected. A key is owed the time by which the urgent key exceeds it, with shares
proportional to the running images. So urgency decides over short periods, fairness over seconds, and no key starves
another, however urgent or slow it is: while the running images do not change, a key gets its share of the device, short
by at most half a second plus one iteration of each key.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from noria.scheduling.types import BatchKey

_MAX_OWED_S = 0.5


@dataclass(slots=True)
class StrideScheduler:
    """Device time used by each batch key, in seconds per running image (stride scheduling, Waldspurger 1995)."""

    _used_s: dict[BatchKey, float] = field(default_factory=dict)

    def next(self, num_running: Mapping[BatchKey, int], urgent: BatchKey) -> BatchKey:
        """Select the key to step among those of `num_running`; `urgent` is the key of the most urgent image."""
        min_used_s = min(
            (self._used_s[batch_key] for batch_key in num_running if batch_key in self._used_s), default=0.0
        )
        # A key that is new, or back, starts at the minimum: it accumulates no credit while it has no images.
        self._used_s = {batch_key: self._used_s.get(batch_key, min_used_s) for batch_key in num_running}
        max_owed_s = max(
            (self._used_s[urgent] - self._used_s[batch_key]) * num for batch_key, num in num_running.items()
        )
        # Not the key that is owed most: one with many images would keep one with fewer waiting beyond the bound.
        return min(num_running, key=lambda batch_key: self._used_s[batch_key]) if max_owed_s > _MAX_OWED_S else urgent

    def charge(self, batch_key: BatchKey, seconds: float, num_running: int) -> None:
        """Record that `batch_key`, with `num_running` images, uses the device for `seconds`."""
        self._used_s[batch_key] += seconds / num_running
