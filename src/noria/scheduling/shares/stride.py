"""Selects the batch key (model and size) of an iteration, which steps images of one key only, by stride scheduling.

Keys of one *kind* differ only in the version of the model: they are there while a new version is deployed. They take
turns, whatever is urgent, so that all their images advance equally fast. Shares of time would let the first image of a
new version, and the last one of the old, take several times as long as the others, since its steps cost as much as
those of a few images.

Between kinds, the kind of the most urgent image is selected, unless one is owed more than half a second of device time;
then the kind that is furthest behind per image is selected. A kind is owed the time by which the urgent kind exceeds
it, with shares proportional to the running images. So urgency decides over short periods, fairness over seconds, and no
kind starves another, however urgent or slow it is: while the running images do not change, a kind gets its share of the
device, short by at most half a second plus one iteration of each kind.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from noria.scheduling.types import BatchKey

_MAX_OWED_S = 0.5


def kind_of(batch_key: BatchKey) -> BatchKey:
    """Return the key without the version of its model."""
    if not batch_key.model.version:
        return batch_key
    return batch_key._replace(model=batch_key.model._replace(version=""))


@dataclass(slots=True)
class StrideScheduler:
    """Device time used by each kind, in seconds per running image (stride scheduling, Waldspurger 1995)."""

    _used_s: dict[BatchKey, float] = field(default_factory=dict)  # by kind
    _num_running: dict[BatchKey, float] = field(default_factory=dict)  # by kind
    _last_turns: dict[BatchKey, int] = field(default_factory=dict)
    _num_turns: int = 0

    def next(self, num_running: Mapping[BatchKey, float], urgent: BatchKey) -> BatchKey:
        """Select the key to step among those of `num_running`; `urgent` is the key of the most urgent image.

        The numbers are of images, or of those that the shares of their clients stand for (`fair_width.py`).
        """
        self._num_running = {}
        for batch_key, num in num_running.items():
            kind = kind_of(batch_key)
            self._num_running[kind] = self._num_running.get(kind, 0) + num
        kind = self._next_kind(kind_of(urgent))
        versions = [batch_key for batch_key in num_running if kind_of(batch_key) == kind]
        selected = min(versions, key=lambda batch_key: self._last_turns.get(batch_key, 0))
        self._num_turns += 1
        self._last_turns = {batch_key: self._last_turns.get(batch_key, 0) for batch_key in num_running}
        self._last_turns[selected] = self._num_turns
        return selected

    def charge(self, batch_key: BatchKey, seconds: float) -> None:
        """Record that `batch_key`, which was selected last, uses the device for `seconds`."""
        kind = kind_of(batch_key)
        self._used_s[kind] += seconds / self._num_running[kind]

    def _next_kind(self, urgent: BatchKey) -> BatchKey:
        kinds = self._num_running
        min_used_s = min((self._used_s[kind] for kind in kinds if kind in self._used_s), default=0.0)
        # A kind that is new, or back, starts at the minimum: it accumulates no credit while it has no images.
        self._used_s = {kind: self._used_s.get(kind, min_used_s) for kind in kinds}
        max_owed_s = max((self._used_s[urgent] - self._used_s[kind]) * num for kind, num in kinds.items())
        # Not the kind that is owed most: one with many images would keep one with fewer waiting beyond the bound.
        return min(kinds, key=lambda kind: self._used_s[kind]) if max_owed_s > _MAX_OWED_S else urgent
