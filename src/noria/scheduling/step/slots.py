"""The places in the running batch: numbered, each held by one image or free."""

import heapq


class Slots:
    """`capacity` numbered places; the lowest free one is given out first, so that a light load stays dense."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free = list(range(capacity))

    @property
    def num_free(self) -> int:
        """How many are free."""
        return len(self._free)

    def acquire(self) -> int:
        """A free slot; there must be one."""
        return heapq.heappop(self._free)

    def release(self, slot: int) -> None:
        """Free `slot`."""
        assert 0 <= slot < self.capacity and slot not in self._free, slot
        heapq.heappush(self._free, slot)
