"""The waiting images, sorted by rank, with sums over those ahead of one.

They are in blocks of at most `_MAX_BLOCK` images, and each block keeps its sums. So a change computes the sums of one
block, and a sum over all images ahead takes one addition for each block.
"""

import math
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from noria.scheduling.step.active_request import ActiveRequest, Rank
from noria.scheduling.types import ItemId

_MAX_BLOCK = 64  # with 10,000 images, a change and a sum take about 10 µs each
_FIRST: Rank = (-math.inf, 0.0, 0, 0)


class WaitingImage(NamedTuple):
    """An image in the queue."""

    rank: Rank
    image: ItemId
    active: ActiveRequest
    work_s: float  # its device time


@dataclass(slots=True)
class Block:
    """Neighbours in the queue, at least one; `refresh` updates the sums."""

    images: list[WaitingImage]
    work_s: float = 0.0  # device time of all images
    max_work_s: float = 0.0  # device time of the longest image, or more, after removals
    min_deadline: float = math.inf  # or earlier, after removals

    def refresh(self) -> None:
        """Compute all anew."""
        self.refresh_sum()
        self.max_work_s = max([each.work_s for each in self.images])
        deadlines = [each.active.request.deadline for each in self.images]
        self.min_deadline = min([math.inf if each is None else each for each in deadlines])

    def refresh_sum(self) -> None:
        """Compute the sum anew, so that no rounding errors add up. After removals, that is enough."""
        self.work_s = sum([each.work_s for each in self.images])


class Ahead(NamedTuple):
    """The images and the work that wait ahead of an image."""

    num_images: int
    work_s: float


@dataclass(slots=True)
class WaitingQueue:
    """Requests are added without ranks and taken from `unranked`; then their images are inserted, each with its key."""

    unranked: dict[str, ActiveRequest] = field(default_factory=dict)
    _blocks: list[Block] = field(default_factory=list)
    _num_added: int = 0
    _next_refreshed: Rank = _FIRST

    def __bool__(self) -> bool:
        return bool(self._blocks or self.unranked)

    def __iter__(self) -> Iterator[WaitingImage]:
        """Iterate over the images that have a rank, in order."""
        for block in self._blocks:
            yield from block.images

    def add(self, active: ActiveRequest, *, is_first: bool = False) -> None:
        """Add a request without ranks, behind those with the keys that its images will have, or ahead of them."""
        self._num_added += 1
        active.number = -self._num_added if is_first else self._num_added
        active.ranks = {}
        self.unranked[active.request.attempt_id] = active

    def insert(self, active: ActiveRequest, keys: Iterable[tuple[int, float]]) -> None:
        """Insert images of a request, which are not in the queue, by index and the policy's key."""
        changed = dict[int, Block]()
        for index, key in keys:
            rank = active.ranks[index] = (key, active.turn(index).virtual_finish, active.number, index)
            image = ItemId(active.request.attempt_id, index)
            for block in self._insert(WaitingImage(rank, image, active, active.image_work_s)):
                changed[id(block)] = block
        for block in changed.values():
            block.refresh()

    def _insert(self, image: WaitingImage) -> list[Block]:
        """Insert an image; return the blocks whose sums are to be computed anew."""
        if not self._blocks:
            self._blocks.append(Block([image]))
            return self._blocks[:]
        index = min(self._index(image.rank), len(self._blocks) - 1)
        block = self._blocks[index]
        insort(block.images, image, key=_rank)
        if len(block.images) <= _MAX_BLOCK:
            return [block]
        half = len(block.images) // 2
        self._blocks.insert(index + 1, Block(block.images[half:]))
        del block.images[half:]
        return self._blocks[index : index + 2]

    def remove(self, active: ActiveRequest) -> None:
        """Remove a request from the queue."""
        if self.unranked.pop(active.request.attempt_id, None) is None:
            for index in list(active.ranks):
                self.remove_image(active, index)

    def remove_image(self, active: ActiveRequest, index: int) -> None:
        """Remove an image from the queue, if it has a rank."""
        if index not in active.ranks:
            return
        rank = active.ranks.pop(index)
        number = self._index(rank)
        images = self._blocks[number].images
        position = bisect_left(images, rank, key=_rank)
        assert images[position].active is active, active
        del images[position]
        if images:
            self._blocks[number].refresh_sum()
        else:
            del self._blocks[number]

    def ahead_of(self, rank: Rank) -> Ahead:
        """Return what waits ahead of an image."""
        index = self._index(rank)
        num_images = sum([len(block.images) for block in self._blocks[:index]])
        work_s = sum([block.work_s for block in self._blocks[:index]])
        ahead = self._blocks[index].images[: bisect_left(self._blocks[index].images, rank, key=_rank)]
        return Ahead(num_images + len(ahead), work_s + sum([each.work_s for each in ahead]))

    def blocks_from(self, rank: Rank) -> Iterator[tuple[Block, float]]:
        """Iterate over the blocks from the first with an image at or behind `rank`, with the work ahead of each."""
        index = self._index(rank)
        work_s = sum([block.work_s for block in self._blocks[:index]])
        for block in self._blocks[index:]:
            yield block, work_s
            work_s += block.work_s

    def next_to_refresh(self, num: int) -> list[WaitingImage]:
        """Return the next `num` images in turn, so that repeated calls return all."""
        if not self._blocks:
            return []
        index = self._index(self._next_refreshed)
        if index == len(self._blocks):
            index, self._next_refreshed = 0, _FIRST
        images = self._blocks[index].images
        first = bisect_left(images, self._next_refreshed, key=_rank)
        found = images[first : first + num]
        self._next_refreshed = (*found[-1].rank[:3], found[-1].image.index + 1)
        return found

    def _index(self, rank: Rank) -> int:
        """Return the index of the first block whose last image is at or behind `rank`; their number if none is."""
        return bisect_left(self._blocks, rank, key=_last_rank)


def _rank(image: WaitingImage) -> Rank:
    return image.rank


def _last_rank(block: Block) -> Rank:
    return block.images[-1].rank
