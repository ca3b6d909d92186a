"""The slots of the running batch: numbered, each free or held by one image."""

import heapq


class Slots:
    """Slots 0 to `capacity` - 1. The lowest free one is taken first, so that used slots stay dense at low load."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free = list(range(capacity))

    @property
    def num_free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    def acquire(self) -> int:
        """Take the lowest free slot; at least one must be free."""
        return heapq.heappop(self._free)

    def reacquire(self, slot: int) -> None:
        """Take `slot`, which must be free."""
        self._free.remove(slot)
        heapq.heapify(self._free)

    def release(self, slot: int) -> None:
        """Free `slot`, which must be taken."""
        assert 0 <= slot < self.capacity and slot not in self._free, slot
        heapq.heappush(self._free, slot)
