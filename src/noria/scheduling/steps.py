"""The step scheduler: which image takes which slot, and what the next turn of the wheel does.

Rules:
  - Images board in order of arrival as soon as a slot is free, at any turn; nothing waits for company.
  - Shape classes with seated images take turns, one model call each, so none starves another.
  - A turn decodes at most `decode_batch` images, of one shape class, the longest waiting first; the others keep their slots, which
    bounds how many wait. A running image is therefore delayed by one small decode at most.
  - Whatever is cancelled, expired or failed is gone from the next plan, all its images with it.
  - Every `submit` ends in exactly one `RequestEnded`.

Time is monotonic seconds and always an argument. What a slot holds, and how a step is computed, is not known here.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from noria.scheduling.plans import (
    End,
    Event,
    ImageDecoded,
    ImageId,
    Outcome,
    Plan,
    RequestEnded,
    Seat,
    ShapeClass,
    Step,
    Ticket,
    Times,
)
from noria.scheduling.slots import Slots


@dataclass(slots=True)
class _Request:
    ticket: Ticket
    submitted: float
    left: set[int]  # indices of images not yet decoded
    times: Times = Times()  # of the image decoded last


@dataclass(slots=True)
class _Seated:
    slot: int
    ticket: Ticket
    boarded: float
    call: int = 0  # the next row of the table
    encode_s: float = 0.0

    @property
    def drawn(self) -> bool:
        return self.call == self.ticket.num_calls


@dataclass(slots=True)
class StepScheduler:
    """Decides; does nothing. `plan` and `commit` alternate; `submit`, `cancel` and `expire` may come between any two calls."""

    num_slots: int
    decode_batch: int = 4
    queue_limit: int = 256  # images that may wait beyond the free slots
    _slots: Slots = field(init=False)
    _requests: dict[str, _Request] = field(init=False, default_factory=dict)
    _waiting: dict[ImageId, None] = field(init=False, default_factory=dict)  # in order of arrival
    _seated: dict[ImageId, _Seated] = field(init=False, default_factory=dict)  # in order of boarding
    _shapes: list[ShapeClass] = field(init=False, default_factory=list)  # whose turn it is: first is next

    def __post_init__(self) -> None:
        self._slots = Slots(self.num_slots)

    @property
    def num_waiting(self) -> int:
        """Images without a slot."""
        return len(self._waiting)

    @property
    def num_seated(self) -> int:
        """Images with a slot."""
        return len(self._seated)

    @property
    def calls_left(self) -> int:
        """Model calls still to be made for everything that was accepted."""
        waiting = sum(self._requests[image.request_id].ticket.num_calls for image in self._waiting)
        return waiting + sum(seated.ticket.num_calls - seated.call for seated in self._seated.values())

    def submit(self, ticket: Ticket, now: float) -> list[Event]:
        """Take a request in, or refuse it at once when too many images wait."""
        assert ticket.request_id not in self._requests, ticket.request_id
        room = self.queue_limit + self._slots.num_free - len(self._waiting)
        if ticket.num_images > room:
            waits = f"{len(self._waiting)} images wait, {self.queue_limit} may"
            return [
                RequestEnded(
                    ticket.request_id, End.REFUSED, f"the queue is full: {waits}; {ticket.num_images} more asked for"
                )
            ]
        self._requests[ticket.request_id] = _Request(ticket, now, set(range(ticket.num_images)))
        self._waiting |= dict.fromkeys(ImageId(ticket.request_id, index) for index in range(ticket.num_images))
        return []

    def cancel(self, request_id: str, now: float) -> list[Event]:  # noqa: ARG002 - the contract of every scheduler
        """End a request; one that is unknown, or has ended, is nobody's loss."""
        return self._end(request_id, End.CANCELLED, "cancelled by the caller") if request_id in self._requests else []

    def expire(self, now: float) -> list[Event]:
        """End every request whose deadline has passed."""
        late = [
            r.ticket.request_id
            for r in self._requests.values()
            if r.ticket.deadline is not None and r.ticket.deadline <= now
        ]
        return [event for request_id in late for event in self._end(request_id, End.EXPIRED, "its time was over")]

    def next_deadline(self) -> float | None:
        """When `expire` will next have something to do, if nothing else happens."""
        return min((r.ticket.deadline for r in self._requests.values() if r.ticket.deadline is not None), default=None)

    def plan(self, now: float) -> Plan | None:
        """The next turn, or None when there is nothing to do."""
        boards = self._board(now)
        steps = self._next_steps()
        decodes = self._next_decodes(steps)
        return Plan(boards, steps, decodes) if boards or steps or decodes else None

    def commit(self, plan: Plan, outcome: Outcome, now: float) -> list[Event]:
        """Take note of a turn that was carried out. What was cancelled meanwhile is passed over."""
        events: list[Event] = []
        for image, reason in outcome.failed.items():
            if image in self._seated:
                events += self._end(image.request_id, End.FAILED, reason)
        for seat in plan.boards:
            if seat.image in self._seated:
                self._seated[seat.image].encode_s = outcome.encode_s
        for step in plan.steps:
            if step.image in self._seated:
                self._seated[step.image].call = step.call + 1
        for seat in plan.decodes:
            if seat.image in self._seated:
                events += self._decoded(seat.image, outcome, now)
        return events

    def _board(self, now: float) -> tuple[Seat, ...]:
        boarding = [image for image, _ in zip(self._waiting, range(self._slots.num_free), strict=False)]
        for image in boarding:
            ticket = self._requests[image.request_id].ticket
            del self._waiting[image]
            self._seated[image] = _Seated(self._slots.take(), ticket, now)
            if ticket.shape not in self._shapes:
                self._shapes.append(ticket.shape)
        return tuple(Seat(image, self._seated[image].slot) for image in boarding)

    def _next_steps(self) -> tuple[Step, ...]:
        running = {image: seated for image, seated in self._seated.items() if not seated.drawn}
        populated = {seated.ticket.shape for seated in running.values()}
        self._shapes = [shape for shape in self._shapes if shape in populated]
        if not self._shapes:
            return ()
        shape = self._shapes.pop(0)
        self._shapes.append(shape)
        return tuple(Step(image, s.slot, s.call) for image, s in running.items() if s.ticket.shape == shape)

    def _next_decodes(self, steps: Iterable[Step]) -> tuple[Seat, ...]:
        about_to_be_drawn = [step.image for step in steps if step.call + 1 == self._seated[step.image].ticket.num_calls]
        ready = [image for image, seated in self._seated.items() if seated.drawn] + about_to_be_drawn
        if not ready:
            return ()
        shape = self._seated[ready[0]].ticket.shape
        alike = [image for image in ready if self._seated[image].ticket.shape == shape]
        return tuple(Seat(image, self._seated[image].slot) for image in alike[: self.decode_batch])

    def _decoded(self, image: ImageId, outcome: Outcome, now: float) -> list[Event]:
        request, seated = self._requests[image.request_id], self._seated.pop(image)
        self._slots.give_back(seated.slot)
        request.left.discard(image.index)
        in_slot_s = now - seated.boarded
        request.times = Times(
            queue_s=seated.boarded - request.submitted,
            encode_s=seated.encode_s,
            denoise_s=max(0.0, in_slot_s - seated.encode_s - outcome.decode_s),
            decode_s=outcome.decode_s,
        )
        events: list[Event] = [ImageDecoded(image)]
        return events if request.left else events + self._end(image.request_id, End.FINISHED, "")

    def _end(self, request_id: str, end: End, reason: str) -> list[Event]:
        request, num_unseated = self._requests.pop(request_id), 0
        for index in request.left:
            image = ImageId(request_id, index)
            self._waiting.pop(image, None)
            if (seated := self._seated.pop(image, None)) is not None:
                self._slots.give_back(seated.slot)
                num_unseated += 1
        return [RequestEnded(request_id, end, reason, request.times, num_unseated)]
