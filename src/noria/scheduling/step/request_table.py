"""The accepted requests and their images, waiting or running. Bookkeeping only: decides nothing.

An *evicted* image waits, too: it has had a slot, its state is saved, and it goes on where it was.
"""

import heapq
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from noria.scheduling.shares.fair_shares import FairShares
from noria.scheduling.step.active_request import ActiveRequest
from noria.scheduling.step.waiting_queue import WaitingQueue
from noria.scheduling.types import (
    NO_TIMINGS,
    BatchKey,
    ImageProgress,
    ItemId,
    PhaseTimings,
    ReleasedImage,
    RequestTimings,
    SchedulableRequest,
)


@dataclass(slots=True)
class RunningImage:
    """An image with a slot, or one that is evicted."""

    image: ItemId
    active: ActiveRequest
    slot: int  # the last one, if it is evicted
    joined_at: float  # at first
    call: int = 0  # the next row of its sampler's table
    join_timings: PhaseTimings = NO_TIMINGS  # timings of the iteration in which it joined
    batch_size_sum: int = 0  # images per call, itself included, summed over its calls so far
    was_evicted: bool = False
    # Read of each running image at each plan, so they are fields, all of the request:
    rows: int = field(init=False)  # rows of it in a model call
    client: str = field(init=False)
    weight: float = field(init=False)  # weight of its client's share
    deadline_s: float | None = field(init=False)  # on the scheduler's clock

    def __post_init__(self) -> None:
        request = self.active.request
        self.rows, self.deadline_s = request.rows, request.deadline
        self.client, self.weight = request.client, request.weight

    @property
    def request(self) -> SchedulableRequest:
        """The request that it is of."""
        return self.active.request

    @property
    def calls_left(self) -> int:
        """Model calls until only its decode is left."""
        return self.active.request.num_calls - self.call

    @property
    def step_key(self) -> BatchKey:
        """The batch key of its next call, or of the last one."""
        return self.active.request.step_key(self.call)

    @property
    def is_denoised(self) -> bool:
        """Whether only its decode is left."""
        return self.call == self.active.request.num_calls

    @property
    def progress(self) -> ImageProgress:
        """How far it is."""
        return ImageProgress(self.call, self.batch_size_sum)


@dataclass(slots=True)
class Work:
    """Waiting images of one batch key with equal rows, each in its first stage, and their model calls."""

    num_images: int = 0
    num_calls: int = 0
    num_encodes: int = 0  # start images, also those of requests that run


WorkByCost = dict[tuple[BatchKey, int], Work]
"""Work by batch key and rows of an image; none is empty."""


@dataclass(slots=True)
class RequestTable:
    """Requests by id; each unfinished image is either waiting, or running, in order of joining."""

    num_slots: int
    version: int = field(init=False, default=0)  # changes with all but new requests
    requests: dict[str, ActiveRequest] = field(init=False, default_factory=dict)
    running: dict[ItemId, RunningImage] = field(init=False, default_factory=dict)
    evicted: dict[ItemId, RunningImage] = field(init=False, default_factory=dict)  # these wait
    max_evicted: int = field(init=False)  # fewer than the slots while the host's memory fits no more
    queue: WaitingQueue = field(init=False, default_factory=WaitingQueue)
    waiting_work: WorkByCost = field(init=False, default_factory=dict)
    work_by_client: dict[str, WorkByCost] = field(init=False, default_factory=dict)  # the parts of `waiting_work`
    waiting_by_client: Counter[str] = field(init=False, default_factory=Counter)  # numbers of images
    shares: FairShares = field(
        init=False, default_factory=FairShares
    )  # shares of the clients of images that have turns
    # A heap: the lowest one is taken first, so that used slots stay dense at low load.
    _free_slots: list[int] = field(init=False)
    _expiries: list[tuple[float, str]] = field(init=False, default_factory=list)  # sorted
    _arrivals: list[tuple[float, str]] = field(init=False, default_factory=list)  # arrivals of waiting requests; sorted

    def __post_init__(self) -> None:
        self.max_evicted = self.num_slots
        self._free_slots = list(range(self.num_slots))

    @property
    def num_waiting(self) -> int:
        """Number of images without a slot."""
        return sum(work.num_images for work in self.waiting_work.values())

    @property
    def num_evictable(self) -> int:
        """How many images more can be evicted now."""
        return max(self.max_evicted - len(self.evicted), 0)

    @property
    def oldest_arrival(self) -> float | None:
        """When the oldest request with a waiting image arrived; None if none waits."""
        return self._arrivals[0][0] if self._arrivals else None

    def evicted_by_client(self) -> dict[str, int]:
        """Return the numbers of each client's evicted images."""
        return dict(Counter([running.request.client for running in self.evicted.values()]))

    def expired(self, now: float) -> list[tuple[str, float, float]]:
        """Return the requests whose `expires_at` has passed, with that and their arrival, the earliest first."""
        passed = self._expiries[: bisect_left(self._expiries, (now, "\U0010ffff"))]
        return [(attempt_id, at, self.requests[attempt_id].arrived_at) for at, attempt_id in passed]

    def bump_version(self) -> None:
        """Mark forecasts as outdated."""
        self.version += 1

    def add(self, request: SchedulableRequest, now: float) -> ActiveRequest:
        """Add a request; all its images wait."""
        active = ActiveRequest(request, now, set(request.indices), request.has_start_image)
        self.restore(active)
        return active

    def restore(self, active: ActiveRequest) -> None:
        """Add a request again that was removed before any of its images joined."""
        request = active.request
        self.requests[request.attempt_id] = active
        if request.expires_at is not None:
            insort(self._expiries, (request.expires_at, request.attempt_id))
        if active.needs_encode:
            self._count_work(request, request.batch_key, num_encodes=1)
        self.shares.restore(request, active.turns)
        self._enqueue(active, active.undecoded)

    def _enqueue(self, active: ActiveRequest, indices: Iterable[int], *, is_first: bool = False) -> None:
        """Let further images of a request wait."""
        if active.waiting:
            self._leave_queue(active)
        active.waiting = sorted({*active.waiting, *indices})
        self._count_waiting(active, active.waiting, 1)
        insort(self._arrivals, (active.arrived_at, active.request.attempt_id))
        self.queue.add(active, is_first=is_first)

    def _leave_queue(self, active: ActiveRequest) -> None:
        self.queue.remove(active)
        _discard(self._arrivals, (active.arrived_at, active.request.attempt_id))
        self._count_waiting(active, active.waiting, -1)

    def _count_waiting(self, active: ActiveRequest, indices: Sequence[int], sign: int) -> None:
        """Count images of a request as waiting (`sign` 1), or no longer (-1)."""
        request = active.request
        self.waiting_by_client[request.client] += sign * len(indices)
        if not self.waiting_by_client[request.client]:
            del self.waiting_by_client[request.client]
        by_call = {0: len(indices)}
        if self.evicted or request.resumed is not None:
            by_call = Counter(self._next_call(request, index) for index in indices)
        for call, num in by_call.items():
            for batch_key, num_calls in request.calls_by_key(call):
                num_images = sign * num if batch_key == request.last_key else 0
                self._count_work(request, batch_key, num_images, sign * num * num_calls)

    def _count_work(
        self,
        request: SchedulableRequest,
        batch_key: BatchKey,
        num_images: int = 0,
        num_calls: int = 0,
        num_encodes: int = 0,
    ) -> None:
        """Add to the work of a request's client and of all; negative numbers subtract."""
        own, cost_key = self.work_by_client.setdefault(request.client, {}), (batch_key, request.rows)
        for works in (self.waiting_work, own):
            work = works.setdefault(cost_key, Work())
            work.num_images += num_images
            work.num_calls += num_calls
            work.num_encodes += num_encodes
            if not (work.num_images or work.num_calls or work.num_encodes):
                del works[cost_key]
        if not own:
            del self.work_by_client[request.client]

    def assign(self, image: ItemId, now: float) -> None:
        """Give a waiting image a slot; one must be free."""
        active = self._dequeue(image)
        slot = heapq.heappop(self._free_slots)
        running = self.evicted.pop(image, None)
        if running is None:
            call, batch_size_sum = active.request.progress_of(image.index)
            running = RunningImage(image, active, slot, now, call, batch_size_sum=batch_size_sum)
        running.slot = slot
        self.running[image] = running
        self.bump_version()

    def _dequeue(self, image: ItemId) -> ActiveRequest:
        """Let an image no longer wait; return its request."""
        active = self.requests[image.attempt_id]
        if len(active.waiting) == 1:
            self._leave_queue(active)
            active.waiting = []
        else:
            active.waiting.remove(image.index)
            self._count_waiting(active, [image.index], -1)
            self.queue.remove_image(active, image.index)
        return active

    def evict(self, image: ItemId) -> ReleasedImage:
        """Let a running image wait again, where it is; return the slot that it leaves, and its progress."""
        running = self.running[image]
        running.was_evicted = True
        self.requeue([image])
        return ReleasedImage(image, running.slot, running.progress)

    def mark_encoded(self, attempt_id: str) -> None:
        """Record that the start image of a request is encoded."""
        active = self.requests[attempt_id]
        if active.needs_encode:
            active.needs_encode = False
            self._count_work(active.request, active.request.batch_key, num_encodes=-1)

    def record_steps(self, images: Iterable[ItemId], batch_size: int) -> None:
        """Record a model call shared by `batch_size` images, of which these still run."""
        work_s = 0.0
        for image in images:
            running = self.running[image]
            running.call += 1
            running.batch_size_sum += batch_size
            work_s += running.active.call_work_s(image.index)
        if work_s:
            self.shares.advance(work_s)
        self.version += 1

    def requeue(self, images: Iterable[ItemId]) -> None:
        """Move running images back to the queue, ahead of others with equal keys; those that were evicted are again."""
        for image in reversed(list(images)):
            running = self.running.pop(image)
            heapq.heappush(self._free_slots, running.slot)
            if running.was_evicted:
                self.evicted[image] = running
            self._enqueue(running.active, [image.index], is_first=True)
        self.bump_version()

    def undo_evict(self, evicted: ReleasedImage) -> None:
        """Give an image that was evicted the slot again that it has left, which must be free."""
        assert evicted.slot is not None, evicted
        self._dequeue(evicted.image)
        self._free_slots.remove(evicted.slot)
        heapq.heapify(self._free_slots)
        self.running[evicted.image] = self.evicted.pop(evicted.image)
        self.bump_version()

    def complete(self, image: ItemId) -> RunningImage:
        """Remove a running image that was decoded, and free its slot."""
        running = self.running.pop(image)
        heapq.heappush(self._free_slots, running.slot)
        active = running.active
        active.undecoded.discard(image.index)
        self._leave_shares(active, [image.index])
        active.turns.pop(image.index, None)
        self.bump_version()
        return running

    def remove(self, attempt_id: str) -> tuple[ActiveRequest, int]:
        """Remove a request; return it and the number of its unfinished images that had a slot, or were evicted."""
        active, num_departures = self.requests.pop(attempt_id), 0
        self.bump_version()
        if active.request.expires_at is not None:
            _discard(self._expiries, (active.request.expires_at, attempt_id))
        if active.needs_encode:
            self._count_work(active.request, active.request.batch_key, num_encodes=-1)
        unused = {index for index in active.waiting if ItemId(attempt_id, index) not in self.evicted}
        self._leave_shares(active, unused, unused=True)
        self._leave_shares(active, active.undecoded - unused)
        if active.waiting:
            self._leave_queue(active)
            active.waiting = []
        for image in active.images:
            if (running := self.running.pop(image, None)) is not None:
                heapq.heappush(self._free_slots, running.slot)
            if running is not None or self.evicted.pop(image, None) is not None:
                num_departures += 1
        return active, num_departures

    def _leave_shares(self, active: ActiveRequest, indices: Iterable[int], *, unused: bool = False) -> None:
        """Forget the turns of images that end."""
        turns = {index: active.turns[index] for index in indices if index in active.turns}
        self.shares.leave(active.request, turns, unused=unused)

    def timings_so_far(self, attempt_id: str, now: float) -> RequestTimings:
        """Timings of an unfinished request, of the image that got furthest among those not yet decoded."""
        active, begun = self.requests[attempt_id], self._begun(attempt_id)
        if not begun:
            return RequestTimings(queue_s=now - active.arrived_at)
        furthest = max(begun, key=lambda each: each.call)
        return RequestTimings(
            queue_s=furthest.joined_at - active.arrived_at,
            slot_s=now - furthest.joined_at,
            join_timings=furthest.join_timings,
            mean_batch=furthest.batch_size_sum / max(furthest.call, 1),
            num_calls=furthest.call,
        )

    def held_by(self, attempt_id: str) -> tuple[ReleasedImage, ...]:
        """Return the images of a request that have slots or are evicted."""
        return tuple(
            ReleasedImage(each.image, each.slot if each.image in self.running else None, each.progress)
            for each in self._begun(attempt_id)
        )

    def _begun(self, attempt_id: str) -> list[RunningImage]:
        images = self.requests[attempt_id].images
        begun = [self.running.get(image) or self.evicted.get(image) for image in images]
        return [each for each in begun if each is not None]

    def request_of(self, image: ItemId) -> SchedulableRequest:
        """Return the request of an image."""
        return self.requests[image.attempt_id].request

    def next_call(self, image: ItemId) -> int:
        """Return the next row of the image's sampler table."""
        return self._next_call(self.request_of(image), image.index)

    def waiting_call(self, active: ActiveRequest, index: int) -> int:
        """Return what `next_call` does of a waiting image, at once where none has begun."""
        if not self.evicted and active.request.resumed is None:
            return 0
        return self._next_call(active.request, index)

    def _next_call(self, request: SchedulableRequest, index: int) -> int:
        image = ItemId(request.attempt_id, index)
        begun = self.running.get(image) or self.evicted.get(image)
        return begun.call if begun is not None else request.progress_of(index).call


def _discard(values: list[tuple[float, str]], value: tuple[float, str]) -> None:
    index = bisect_left(values, value)
    assert values[index] == value, value
    del values[index]


def cost_key(images: Sequence[RunningImage]) -> BatchKey:
    """Return the key of the largest size in a call, to which its rows are padded."""
    if images[0].active.request.call_size is None:
        return images[0].step_key
    return max((running.step_key for running in images), key=lambda key: key.area_px)


def count_rows(images: Iterable[RunningImage]) -> int:
    """Return the rows of images in a call."""
    return sum([running.rows for running in images])
