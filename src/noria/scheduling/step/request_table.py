"""The accepted requests and their images, waiting or running. Bookkeeping only: decides nothing."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from noria.scheduling.step.forecast import Forecast
from noria.scheduling.step.slots import Slots
from noria.scheduling.types import NO_TIMINGS, BatchKey, ItemId, PhaseTimings, RequestTimings, SchedulableRequest


@dataclass(slots=True)
class ActiveRequest:
    """A request that has not ended."""

    request: SchedulableRequest
    arrived_at: float
    undecoded: set[int]  # indices of images not yet decoded
    needs_encode: bool  # whether it has a start image, which is not encoded yet
    timings: RequestTimings = RequestTimings()  # of the image decoded last
    promised_forecast: Forecast = Forecast(0.0, 0.0)  # at admission, uncorrected
    priority_penalty: float = 0.0  # added to the policy's key, to rank it behind accepted deadlines that it would break

    @property
    def images(self) -> list[ItemId]:
        """Its images that are not yet decoded, in order."""
        return [ItemId(self.request.attempt_id, index) for index in sorted(self.undecoded)]


@dataclass(slots=True)
class RunningImage:
    """An image with a slot."""

    slot: int
    request: SchedulableRequest
    joined_at: float
    call: int = 0  # the next row of its sampler's table
    join_timings: PhaseTimings = NO_TIMINGS  # of the iteration in which it joined
    batch_size_sum: int = 0  # images per call, itself included, summed over its calls so far

    @property
    def step_key(self) -> BatchKey:
        """The batch key of its next call, or of the last one."""
        return self.request.step_key(self.call)

    @property
    def is_denoised(self) -> bool:
        """Whether only its decode is left."""
        return self.call == self.request.num_calls


@dataclass(slots=True)
class RequestTable:
    """Requests by id; each unfinished image is either waiting, in order of arrival, or running, in order of joining."""

    num_slots: int
    version: int = field(init=False, default=0)  # changes whenever forecasts become outdated
    requests: dict[str, ActiveRequest] = field(init=False, default_factory=dict)
    waiting: dict[ItemId, None] = field(init=False, default_factory=dict)
    running: dict[ItemId, RunningImage] = field(init=False, default_factory=dict)
    _slots: Slots = field(init=False)

    def __post_init__(self) -> None:
        self._slots = Slots(self.num_slots)

    @property
    def num_free_slots(self) -> int:
        """Number of free slots."""
        return self._slots.num_free

    def bump_version(self) -> None:
        """Mark forecasts as outdated."""
        self.version += 1

    def add(self, request: SchedulableRequest, now: float) -> ActiveRequest:
        """Add a request; all its images wait."""
        active = ActiveRequest(request, now, set(range(request.num_images)), request.has_start_image)
        self.restore(active)
        return active

    def restore(self, active: ActiveRequest) -> None:
        """Add a request again that was removed before any of its images joined."""
        self.requests[active.request.attempt_id] = active
        self.waiting |= dict.fromkeys(active.images)
        self.bump_version()

    def assign(self, image: ItemId, now: float) -> None:
        """Give a waiting image a slot; one must be free."""
        del self.waiting[image]
        self.running[image] = RunningImage(self._slots.acquire(), self.requests[image.attempt_id].request, now)
        self.bump_version()

    def record_step(self, image: ItemId, call: int, batch_size: int) -> None:
        """Record a model call shared by `batch_size` images; the next one of this image is `call`."""
        self.running[image].call = call
        self.running[image].batch_size_sum += batch_size
        self.bump_version()

    def requeue(self, images: Iterable[ItemId]) -> None:
        """Move running images to the front of the queue."""
        images = list(images)
        for image in images:
            self._slots.release(self.running.pop(image).slot)
        self.waiting = dict.fromkeys(images) | self.waiting
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
        for image in active.images:
            self.waiting.pop(image, None)
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

    def request_of(self, image: ItemId) -> SchedulableRequest:
        """Return the request of an image."""
        return self.requests[image.attempt_id].request

    def next_call(self, image: ItemId) -> int:
        """Return the next row of the image's sampler table; 0 while it waits."""
        running = self.running.get(image)
        return running.call if running is not None else 0

    def calls_left(self, attempt_id: str) -> int:
        """Return the remaining calls of all images of the request together."""
        active = self.requests[attempt_id]
        return sum(active.request.num_calls - self.next_call(image) for image in active.images)
