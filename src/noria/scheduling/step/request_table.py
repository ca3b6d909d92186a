"""The accepted requests and their images, waiting or running. Bookkeeping only: decides nothing."""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from noria.scheduling.step.active_request import ActiveRequest
from noria.scheduling.step.slots import Slots
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
    """An image with a slot."""

    image: ItemId
    active: ActiveRequest
    slot: int
    joined_at: float
    call: int = 0  # the next row of its sampler's table
    join_timings: PhaseTimings = NO_TIMINGS  # of the iteration in which it joined
    batch_size_sum: int = 0  # images per call, itself included, summed over its calls so far

    @property
    def request(self) -> SchedulableRequest:
        """The request that it is of."""
        return self.active.request

    @property
    def rows(self) -> int:
        """Rows of it in a model call."""
        return self.active.request.rows

    @property
    def calls_left(self) -> int:
        """Model calls until only its decode is left."""
        return self.active.request.num_calls - self.call

    @property
    def deadline_s(self) -> float | None:
        """Its deadline on the scheduler's clock."""
        return self.active.request.deadline

    @property
    def step_key(self) -> BatchKey:
        """The batch key of its next call, or of the last one."""
        return self.active.request.step_key(self.call)

    @property
    def is_denoised(self) -> bool:
        """Whether only its decode is left."""
        return self.call == self.active.request.num_calls


@dataclass(slots=True)
class Work:
    """Images of one batch key with equal rows, each in its first stage, and their model calls."""

    num_images: int = 0
    num_calls: int = 0


@dataclass(slots=True)
class RequestTable:
    """Requests by id; each unfinished image is either waiting, or running, in order of joining."""

    num_slots: int
    version: int = field(init=False, default=0)  # changes with all but new requests
    requests: dict[str, ActiveRequest] = field(init=False, default_factory=dict)
    running: dict[ItemId, RunningImage] = field(init=False, default_factory=dict)
    queue: WaitingQueue = field(init=False, default_factory=WaitingQueue)
    waiting_work: dict[tuple[BatchKey, int], Work] = field(init=False, default_factory=dict)  # by key and rows
    unencoded: Counter[BatchKey] = field(init=False, default_factory=Counter)  # requests that need an encode
    _slots: Slots = field(init=False)
    _expiries: list[tuple[float, str]] = field(init=False, default_factory=list)  # sorted
    _arrivals: list[tuple[float, str]] = field(init=False, default_factory=list)  # of requests that wait; sorted

    def __post_init__(self) -> None:
        self._slots = Slots(self.num_slots)

    @property
    def num_free_slots(self) -> int:
        """Number of free slots."""
        return self._slots.num_free

    @property
    def num_waiting(self) -> int:
        """Number of images without a slot."""
        return sum(work.num_images for work in self.waiting_work.values())

    @property
    def oldest_arrival(self) -> float | None:
        """When the oldest request with a waiting image arrived; None if none waits."""
        return self._arrivals[0][0] if self._arrivals else None

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
            self.unencoded[request.batch_key] += 1
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
        """Take a request with waiting images out of the queue."""
        self.queue.remove(active)
        _discard(self._arrivals, (active.arrived_at, active.request.attempt_id))
        self._count_waiting(active, active.waiting, -1)

    def _count_waiting(self, active: ActiveRequest, indices: Sequence[int], sign: int) -> None:
        """Count images of a request as waiting (`sign` 1), or no longer (-1)."""
        request = active.request
        begun = request.resumed is not None
        by_call = Counter(request.progress_of(index).call for index in indices) if begun else {0: len(indices)}
        for call, num in by_call.items():
            for number, (batch_key, num_calls) in enumerate(request.calls_by_key(call)):
                work = self.waiting_work.setdefault((batch_key, request.rows), Work())
                work.num_images += 0 if number else sign * num
                work.num_calls += sign * num * num_calls
                if not work.num_images and not work.num_calls:
                    del self.waiting_work[batch_key, request.rows]

    def assign(self, image: ItemId, now: float) -> None:
        """Give a waiting image a slot; one must be free."""
        active = self.requests[image.attempt_id]
        if len(active.waiting) == 1:
            self._leave_queue(active)
            active.waiting = []
        else:
            active.waiting.remove(image.index)
            self._count_waiting(active, [image.index], -1)
            self.queue.update(active)
        call, batch_size_sum = active.request.progress_of(image.index)
        slot = self._slots.acquire()
        self.running[image] = RunningImage(image, active, slot, now, call, batch_size_sum=batch_size_sum)
        self.bump_version()

    def mark_encoded(self, attempt_id: str) -> None:
        """Record that the start image of a request is encoded."""
        active = self.requests[attempt_id]
        if active.needs_encode:
            active.needs_encode = False
            self._count_encoded(active)

    def _count_encoded(self, active: ActiveRequest) -> None:
        self.unencoded[active.request.batch_key] -= 1
        if not self.unencoded[active.request.batch_key]:
            del self.unencoded[active.request.batch_key]

    def record_step(self, image: ItemId, call: int, batch_size: int) -> None:
        """Record a model call shared by `batch_size` images; the next one of this image is `call`."""
        running = self.running[image]
        running.call = call
        running.batch_size_sum += batch_size
        self.version += 1

    def requeue(self, images: Iterable[ItemId]) -> None:
        """Move running images back to the queue, ahead of others with equal keys."""
        for image in reversed(list(images)):
            self._slots.release(self.running.pop(image).slot)
            self._enqueue(self.requests[image.attempt_id], [image.index], is_first=True)
        self.bump_version()

    def complete(self, image: ItemId) -> RunningImage:
        """Remove a running image that was decoded, and free its slot."""
        running = self.running.pop(image)
        self._slots.release(running.slot)
        self.requests[image.attempt_id].undecoded.discard(image.index)
        self.bump_version()
        return running

    def remove(self, attempt_id: str) -> tuple[ActiveRequest, int]:
        """Remove a request; return it and the number of its images that left a slot unfinished."""
        active, num_departures = self.requests.pop(attempt_id), 0
        self.bump_version()
        if active.request.expires_at is not None:
            _discard(self._expiries, (active.request.expires_at, attempt_id))
        if active.needs_encode:
            self._count_encoded(active)
        if active.waiting:
            self._leave_queue(active)
            active.waiting = []
        for image in active.images:
            if (running := self.running.pop(image, None)) is not None:
                self._slots.release(running.slot)
                num_departures += 1
        return active, num_departures

    def timings_so_far(self, attempt_id: str, now: float) -> RequestTimings:
        """Timings of an unfinished request, of the image that got furthest among those not yet decoded."""
        active = self.requests[attempt_id]
        running = [self.running[image] for image in active.images if image in self.running]
        if not running:
            return RequestTimings(queue_s=now - active.arrived_at)
        furthest = max(running, key=lambda each: each.call)
        return RequestTimings(
            queue_s=furthest.joined_at - active.arrived_at,
            slot_s=now - furthest.joined_at,
            join_timings=furthest.join_timings,
            mean_batch=furthest.batch_size_sum / max(furthest.call, 1),
            num_calls=furthest.call,
        )

    def held_by(self, attempt_id: str) -> tuple[ReleasedImage, ...]:
        """Return the images of a request that have slots."""
        images = self.requests[attempt_id].images
        held = [self.running[image] for image in images if image in self.running]
        return tuple(
            ReleasedImage(each.image, each.slot, ImageProgress(each.call, each.batch_size_sum)) for each in held
        )

    def request_of(self, image: ItemId) -> SchedulableRequest:
        """Return the request of an image."""
        return self.requests[image.attempt_id].request

    def next_call(self, image: ItemId) -> int:
        """Return the next row of the image's sampler table."""
        running = self.running.get(image)
        return running.call if running is not None else self.request_of(image).progress_of(image.index).call


def _discard(values: list[tuple[float, str]], value: tuple[float, str]) -> None:
    """Remove a value from a sorted list."""
    index = bisect_left(values, value)
    assert values[index] == value, value
    del values[index]


def cost_key(images: Sequence[RunningImage]) -> BatchKey:
    """Return the key of the largest size in a call, to which its rows are padded."""
    if images[0].active.request.call_size is None:
        return images[0].step_key
    return max((running.active.request.batch_key for running in images), key=lambda key: key.area_px)


def count_rows(images: Iterable[RunningImage]) -> int:
    """Return the rows of images in a call."""
    return sum([running.active.request.rows for running in images])
