"""Everybody who is here: the requests that were accepted, their images in the queue and in the slots. Keeps books; decides nothing."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from noria.scheduling.step.forecast import Forecast
from noria.scheduling.step.slots import Slots
from noria.scheduling.types import NO_TIMINGS, ImageId, PhaseTimings, RequestTimings, SchedulableRequest


@dataclass(slots=True)
class ActiveRequest:
    """A request that has not ended."""

    request: SchedulableRequest
    arrived_at: float
    undecoded: set[int]  # indices of images not yet decoded
    timings: RequestTimings = RequestTimings()  # of the image decoded last
    promised_forecast: Forecast = Forecast(0.0, 0.0)  # at its acceptance, before correction
    priority_penalty: float = (
        0.0  # added to what the policy says, so that it goes behind those who were promised something
    )

    @property
    def images(self) -> list[ImageId]:
        """Those not yet decoded, in order."""
        return [ImageId(self.request.request_id, index) for index in sorted(self.undecoded)]


@dataclass(slots=True)
class RunningImage:
    """An image with a slot."""

    slot: int
    request: SchedulableRequest
    joined_at: float
    call: int = 0  # the next row of the table
    join_timings: PhaseTimings = NO_TIMINGS  # of the turn in which it boarded
    batch_size_sum: int = 0  # images of each of its calls so far, itself included, added up

    @property
    def is_denoised(self) -> bool:
        """Whether only its decoding is left."""
        return self.call == self.request.num_calls


@dataclass(slots=True)
class RequestTable:
    """Requests by id; each image that is left is either waiting, in order of arrival, or seated, in order of boarding."""

    num_slots: int
    version: int = field(init=False, default=0)  # another one whenever a forecast may have become another
    requests: dict[str, ActiveRequest] = field(init=False, default_factory=dict)
    waiting: dict[ImageId, None] = field(init=False, default_factory=dict)
    running: dict[ImageId, RunningImage] = field(init=False, default_factory=dict)
    _slots: Slots = field(init=False)

    def __post_init__(self) -> None:
        self._slots = Slots(self.num_slots)

    @property
    def num_free_slots(self) -> int:
        """Slots that nobody has."""
        return self._slots.num_free

    def bump_version(self) -> None:
        """What was foreseen holds no more."""
        self.version += 1

    def add(self, request: SchedulableRequest, now: float) -> ActiveRequest:
        """Take a request in; all its images wait."""
        active = ActiveRequest(request, now, set(range(request.num_images)))
        self.restore(active)
        return active

    def restore(self, active: ActiveRequest) -> None:
        """Take in who has left before it boarded."""
        self.requests[active.request.request_id] = active
        self.waiting |= dict.fromkeys(active.images)
        self.bump_version()

    def assign(self, image: ImageId, now: float) -> None:
        """Give a waiting image a slot; one must be free."""
        del self.waiting[image]
        self.running[image] = RunningImage(self._slots.acquire(), self.requests[image.request_id].request, now)
        self.bump_version()

    def record_step(self, image: ImageId, call: int, batch_size: int) -> None:
        """A seated image goes on with `call`; so many images shared the last one."""
        self.running[image].call = call
        self.running[image].batch_size_sum += batch_size
        self.bump_version()

    def requeue(self, images: Iterable[ImageId]) -> None:
        """Back to the queue, before all others."""
        images = list(images)
        for image in images:
            self._slots.release(self.running.pop(image).slot)
        self.waiting = dict.fromkeys(images) | self.waiting
        self.bump_version()

    def complete(self, image: ImageId) -> RunningImage:
        """A seated image was decoded."""
        running = self.running.pop(image)
        self._slots.release(running.slot)
        self.requests[image.request_id].undecoded.discard(image.index)
        self.bump_version()
        return running

    def remove(self, request_id: str) -> tuple[ActiveRequest, int]:
        """Forget a request; returns it, and how many of its images left a slot undone."""
        active, num_departures = self.requests.pop(request_id), 0
        self.bump_version()
        for image in active.images:
            self.waiting.pop(image, None)
            if (running := self.running.pop(image, None)) is not None:
                self._slots.release(running.slot)
                num_departures += 1
        return active, num_departures

    def timings_so_far(self, request_id: str, now: float) -> RequestTimings:
        """Where the time of a request has gone, by its image that has come furthest of those not yet decoded."""
        active = self.requests[request_id]
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

    def request_of(self, image: ImageId) -> SchedulableRequest:
        """Of the image's request."""
        return self.requests[image.request_id].request

    def next_call(self, image: ImageId) -> int:
        """The next row of its table; 0 while it waits."""
        running = self.running.get(image)
        return running.call if running is not None else 0

    def calls_left(self, request_id: str) -> int:
        """Of all images of the request together."""
        active = self.requests[request_id]
        return sum(active.request.num_calls - self.next_call(image) for image in active.images)
