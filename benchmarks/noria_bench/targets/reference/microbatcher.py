"""The microbatching of the reference article: which requests run together, and when. Pure: no clock, no I/O.

"The batch timeout [is] set to 500ms by default and the max batchsize is set to 8. This means that every 500ms, if no
group of requests has accumulated 8 requests, we fetch the group with the oldest request and serve those first. Requests
are grouped by width, height, inference_steps, and guidance_scale." (Mermet, Universe Scale Serving of Generative
Models, 2023.)

Where the article does not specify, this implementation favours it: a tick that passes while the device is busy remains
due, so that a device with queued work never idles beyond the next tick; of several full groups, the one with the oldest
request runs first. The batch size counts images (a request with n has n of them); a request larger than the size runs
alone.
"""

import math
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class QueuedRequest(Generic[T]):
    """A queued request."""

    item: T
    num_images: int
    arrived_s: float


class Microbatcher(Generic[T]):
    """The queue. `now` is seconds of a monotonic clock; ticks are its multiples of `timeout_s`."""

    def __init__(self, timeout_s: float = 0.5, max_images: int = 8, now: float = 0.0) -> None:
        self._timeout_s, self._max_images = timeout_s, max_images
        self._groups: dict[Hashable, list[QueuedRequest[T]]] = {}  # never empty; in order of arrival
        self._last_fetch_s = now

    def put(self, group: Hashable, item: T, num_images: int, now: float) -> None:
        """Queue a request."""
        self._groups.setdefault(group, []).append(QueuedRequest(item, num_images, now))

    def fetch(self, now: float) -> list[T]:
        """The next batch of an idle device: a full group at once, the oldest request's group at a tick.

        Empty if nothing is due.
        """
        full = [key for key, queued in self._groups.items() if sum(q.num_images for q in queued) >= self._max_images]
        candidates = full or (list(self._groups) if now >= self._tick_s() else [])
        if not candidates:
            return []
        self._last_fetch_s = now
        return self._take(min(candidates, key=lambda key: self._groups[key][0].arrived_s))

    def next_tick(self) -> float | None:
        """When `fetch` returns a batch even if nothing else arrives; may be in the past. None without requests."""
        return self._tick_s() if self._groups else None

    def _tick_s(self) -> float:
        """The first tick after the last fetch."""
        return (math.floor(self._last_fetch_s / self._timeout_s) + 1) * self._timeout_s

    def _take(self, key: Hashable) -> list[T]:
        queued, num_images, count = self._groups[key], 0, 0
        while count < len(queued) and (count == 0 or num_images + queued[count].num_images <= self._max_images):
            num_images += queued[count].num_images
            count += 1
        self._groups[key] = queued[count:]
        if not self._groups[key]:
            del self._groups[key]
        return [q.item for q in queued[:count]]
