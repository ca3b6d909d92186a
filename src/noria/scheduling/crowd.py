"""Everybody who is here: the requests that were accepted, their images in the queue and in the slots. Keeps books; decides nothing."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from noria.scheduling.forecast import Forecast
from noria.scheduling.plans import NOTHING, ImageId, Spent, Ticket, Times
from noria.scheduling.slots import Slots


@dataclass(slots=True)
class Accepted:
    """A request that has not ended."""

    ticket: Ticket
    submitted: float
    left: set[int]  # indices of images not yet decoded
    times: Times = Times()  # of the image decoded last
    promised: Forecast = Forecast(0.0, 0.0)  # at its acceptance, before correction
    behind: float = 0.0  # added to what the policy says, so that it goes behind those who were promised something

    @property
    def images(self) -> list[ImageId]:
        """Those not yet decoded, in order."""
        return [ImageId(self.ticket.request_id, index) for index in sorted(self.left)]


@dataclass(slots=True)
class Seated:
    """An image with a slot."""

    slot: int
    ticket: Ticket
    boarded: float
    call: int = 0  # the next row of the table
    boarding: Spent = NOTHING  # of the turn in which it boarded
    company: int = 0  # images of each of its calls so far, itself included, added up

    @property
    def drawn(self) -> bool:
        """Whether only its decoding is left."""
        return self.call == self.ticket.num_calls


@dataclass(slots=True)
class Crowd:
    """Requests by id; each image that is left is either waiting, in order of arrival, or seated, in order of boarding."""

    num_slots: int
    version: int = field(init=False, default=0)  # another one whenever a forecast may have become another
    requests: dict[str, Accepted] = field(init=False, default_factory=dict)
    waiting: dict[ImageId, None] = field(init=False, default_factory=dict)
    seated: dict[ImageId, Seated] = field(init=False, default_factory=dict)
    _slots: Slots = field(init=False)

    def __post_init__(self) -> None:
        self._slots = Slots(self.num_slots)

    @property
    def num_free(self) -> int:
        """Slots that nobody has."""
        return self._slots.num_free

    def changed(self) -> None:
        """What was foreseen holds no more."""
        self.version += 1

    def enter(self, ticket: Ticket, now: float) -> Accepted:
        """Take a request in; all its images wait."""
        accepted = Accepted(ticket, now, set(range(ticket.num_images)))
        self.enter_again(accepted)
        return accepted

    def enter_again(self, accepted: Accepted) -> None:
        """Take in who has left before it boarded."""
        self.requests[accepted.ticket.request_id] = accepted
        self.waiting |= dict.fromkeys(accepted.images)
        self.changed()

    def seat(self, image: ImageId, now: float) -> None:
        """Give a waiting image a slot; one must be free."""
        del self.waiting[image]
        self.seated[image] = Seated(self._slots.take(), self.requests[image.request_id].ticket, now)
        self.changed()

    def stepped(self, image: ImageId, call: int, num_together: int) -> None:
        """A seated image goes on with `call`; so many images shared the last one."""
        self.seated[image].call = call
        self.seated[image].company += num_together
        self.changed()

    def unseat(self, images: Iterable[ImageId]) -> None:
        """Back to the queue, before all others."""
        images = list(images)
        for image in images:
            self._slots.give_back(self.seated.pop(image).slot)
        self.waiting = dict.fromkeys(images) | self.waiting
        self.changed()

    def done(self, image: ImageId) -> Seated:
        """A seated image was decoded."""
        seated = self.seated.pop(image)
        self._slots.give_back(seated.slot)
        self.requests[image.request_id].left.discard(image.index)
        self.changed()
        return seated

    def leave(self, request_id: str) -> tuple[Accepted, int]:
        """Forget a request; returns it, and how many of its images left a slot undone."""
        accepted, num_unseated = self.requests.pop(request_id), 0
        self.changed()
        for image in accepted.images:
            self.waiting.pop(image, None)
            if (seated := self.seated.pop(image, None)) is not None:
                self._slots.give_back(seated.slot)
                num_unseated += 1
        return accepted, num_unseated

    def times_so_far(self, request_id: str, now: float) -> Times:
        """Where the time of a request has gone, by its image that has come furthest of those not yet decoded."""
        accepted = self.requests[request_id]
        seats = [self.seated[image] for image in accepted.images if image in self.seated]
        if not seats:
            return Times(queue_s=now - accepted.submitted)
        seat = max(seats, key=lambda each: each.call)
        return Times(
            queue_s=seat.boarded - accepted.submitted,
            slot_s=now - seat.boarded,
            boarding=seat.boarding,
            mean_batch=seat.company / max(seat.call, 1),
            num_calls=seat.call,
        )

    def ticket(self, image: ImageId) -> Ticket:
        """Of the image's request."""
        return self.requests[image.request_id].ticket

    def call(self, image: ImageId) -> int:
        """The next row of its table; 0 while it waits."""
        seated = self.seated.get(image)
        return seated.call if seated is not None else 0

    def calls_left(self, request_id: str) -> int:
        """Of all images of the request together."""
        accepted = self.requests[request_id]
        return sum(accepted.ticket.num_calls - self.call(image) for image in accepted.images)
