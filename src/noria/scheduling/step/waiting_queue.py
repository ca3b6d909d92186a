"""The requests with waiting images, sorted by rank, with sums over those ahead of a request.

They are in blocks of at most `_MAX_BLOCK` requests, and each block keeps its sums. So a change computes the sums of one
block, and a sum over all requests ahead takes one addition for each block.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from noria.scheduling.step.active_request import ActiveRequest, Rank

_MAX_BLOCK = 64  # with 10,000 requests, a change and a sum take about 10 µs each


@dataclass(slots=True)
class Block:
    """Neighbours in the queue, at least one; `refresh` updates the sums."""

    requests: list[ActiveRequest]
    num_images: int = 0
    work_s: float = 0.0  # device time of all images
    max_image_work_s: float = 0.0  # or more, after removals
    min_deadline: float = math.inf  # or earlier, after removals

    def refresh(self) -> None:
        """Compute all anew."""
        self.refresh_sums()
        self.max_image_work_s = max([each.image_work_s for each in self.requests])
        deadlines = [each.request.deadline for each in self.requests]
        self.min_deadline = min([math.inf if each is None else each for each in deadlines])

    def refresh_sums(self) -> None:
        """Compute the sums anew, so that no rounding errors add up. After removals, that is enough."""
        self.num_images = sum([len(each.waiting) for each in self.requests])
        self.work_s = sum([len(each.waiting) * each.image_work_s for each in self.requests])


class Ahead(NamedTuple):
    """What waits ahead of a request."""

    num_images: int
    work_s: float


@dataclass(slots=True)
class WaitingQueue:
    """Requests are added without a rank, taken from `unranked`, and inserted with one."""

    unranked: dict[str, ActiveRequest] = field(default_factory=dict)
    _blocks: list[Block] = field(default_factory=list)
    _num_added: int = 0
    _next_refreshed: Rank = (-math.inf, 0)

    def __bool__(self) -> bool:
        return bool(self._blocks or self.unranked)

    def __iter__(self) -> Iterator[ActiveRequest]:
        """Iterate over the requests that have a rank, in order."""
        for block in self._blocks:
            yield from block.requests

    def add(self, active: ActiveRequest, *, is_first: bool = False) -> None:
        """Add a request without a rank, behind those with the key that it will have, or ahead of them."""
        self._num_added += 1
        active.rank = (0.0, -self._num_added if is_first else self._num_added)
        self.unranked[active.request.attempt_id] = active

    def insert(self, active: ActiveRequest, key: float) -> None:
        """Insert a request that is not in the queue by the policy's key."""
        active.rank = (key, active.rank[1])
        if not self._blocks:
            self._blocks.append(Block([active]))
            self._blocks[0].refresh()
            return
        index = min(self._index(active.rank), len(self._blocks) - 1)
        block = self._blocks[index]
        insort(block.requests, active, key=_rank)
        if len(block.requests) > _MAX_BLOCK:
            half = len(block.requests) // 2
            self._blocks.insert(index + 1, Block(block.requests[half:]))
            del block.requests[half:]
            self._blocks[index + 1].refresh()
        block.refresh()

    def remove(self, active: ActiveRequest) -> None:
        """Remove a request from the queue."""
        if self.unranked.pop(active.request.attempt_id, None) is not None:
            return
        index = self._index(active.rank)
        requests = self._blocks[index].requests
        position = bisect_left(requests, active.rank, key=_rank)
        assert requests[position] is active, active
        del requests[position]
        if requests:
            self._blocks[index].refresh_sums()
        else:
            del self._blocks[index]

    def update(self, active: ActiveRequest) -> None:
        """Record that fewer images of a request wait."""
        if active.request.attempt_id not in self.unranked:
            self._blocks[self._index(active.rank)].refresh_sums()

    def ahead_of(self, active: ActiveRequest) -> Ahead:
        """Return what waits ahead of a request that has a rank."""
        index = self._index(active.rank)
        num_images = sum([block.num_images for block in self._blocks[:index]])
        work_s = sum([block.work_s for block in self._blocks[:index]])
        for each in self._blocks[index].requests:
            if each is active:
                break
            num_images += len(each.waiting)
            work_s += len(each.waiting) * each.image_work_s
        return Ahead(num_images, work_s)

    def blocks_from(self, rank: Rank) -> Iterator[tuple[Block, float]]:
        """Iterate over the blocks from the first with a request at or behind `rank`, with the work ahead of each."""
        index = self._index(rank)
        work_s = sum([block.work_s for block in self._blocks[:index]])
        for block in self._blocks[index:]:
            yield block, work_s
            work_s += block.work_s

    def next_to_refresh(self, num: int) -> list[ActiveRequest]:
        """Return the next `num` requests in turn, so that repeated calls return all."""
        if not self._blocks:
            return []
        index = self._index(self._next_refreshed)
        if index == len(self._blocks):
            index, self._next_refreshed = 0, (-math.inf, 0)
        requests = self._blocks[index].requests
        first = bisect_left(requests, self._next_refreshed, key=_rank)
        found = requests[first : first + num]
        self._next_refreshed = (found[-1].rank[0], found[-1].rank[1] + 1)
        return found

    def _index(self, rank: Rank) -> int:
        """Return the index of the first block whose last request is at or behind `rank`; their number if none is."""
        return bisect_left(self._blocks, rank, key=_last_rank)


def _rank(active: ActiveRequest) -> Rank:
    return active.rank


def _last_rank(block: Block) -> Rank:
    return block.requests[-1].rank
