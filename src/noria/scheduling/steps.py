"""The step scheduler: which image takes which slot, and what the next turn of the wheel does.

Rules:
  - An image boards as soon as a slot is free, at any turn; nothing waits for company. Where slots are few, the policy says who.
  - A turn steps one shape class (`shares.py` says which), as many images as pay together (`costs.py`); where that is not all, the
    policy says who. The others are paused, which costs them nothing but time.
  - A turn decodes at most `decode_batch` images, of one shape class, the longest waiting first; the others keep their slots, which
    bounds how many wait. A running image is therefore delayed by one small decode at most.
  - What would wait too long, or could not meet its deadline, or would make another miss an accepted one, is refused at once.
  - Whatever is cancelled, expired or failed is gone from the next plan, all its images with it.
  - What does not fit the memory is tried again in smaller batches; only what does not fit alone fails.
  - A request that flies `alone` boards an empty wheel, and nobody boards until it has left.
  - Every `submit` ends in exactly one `RequestEnded`.

Time is monotonic seconds and always an argument. What a slot holds, and how a step is computed, is not known here.
"""

import itertools
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from noria.scheduling.batches import Device, together
from noria.scheduling.costs import CostModel
from noria.scheduling.crowd import Crowd
from noria.scheduling.outlook import Outlook
from noria.scheduling.plans import (
    NOTHING,
    End,
    Event,
    ImageDecoded,
    ImageId,
    Outcome,
    Part,
    Plan,
    RequestEnded,
    Seat,
    SeatedImage,
    ShapeClass,
    Standing,
    Step,
    Ticket,
    Times,
    WaitingRequest,
    Whereabouts,
)
from noria.scheduling.policies import Policy, least_slack
from noria.scheduling.shares import Shares


@dataclass(slots=True)
class StepScheduler:
    """Decides; does nothing. `plan` and `commit` alternate; `submit`, `cancel` and `expire` may come between any two calls."""

    num_slots: int
    decode_batch: int = 4
    queue_limit: int = 256  # images that may wait beyond the free slots
    queue_limit_s: float = math.inf  # seconds of work that may be ahead of whoever has to wait
    policy: Policy = least_slack
    costs: CostModel = field(default_factory=CostModel)
    _crowd: Crowd = field(init=False)
    _outlook: Outlook = field(init=False)
    _shares: Shares = field(init=False, default_factory=Shares)
    _decode_limits: dict[ShapeClass, int] = field(init=False, default_factory=dict)  # where fewer fit the memory

    def __post_init__(self) -> None:
        self._crowd = Crowd(self.num_slots)
        self._outlook = Outlook(self._crowd, self.costs, self.policy, self.num_slots, self.decode_batch)

    @property
    def num_waiting(self) -> int:
        """Images without a slot."""
        return len(self._crowd.waiting)

    @property
    def num_seated(self) -> int:
        """Images with a slot."""
        return len(self._crowd.seated)

    def oldest_age_s(self, now: float) -> float:
        """How long ago the oldest request of those with an image that waits for a slot came; 0 without any."""
        came = {image.request_id: self._crowd.requests[image.request_id].submitted for image in self._crowd.waiting}
        return max(0.0, now - min(came.values(), default=now))

    @property
    def drain_s(self) -> float:
        """About how long everything that was accepted will take, if nobody else comes."""
        return self._outlook.drain_s

    def submit(self, ticket: Ticket, now: float, arrived: float | None = None) -> list[Event]:
        """Take a request in, or refuse it at once. Its waiting counts from when it `arrived`; left out, from now."""
        assert ticket.request_id not in self._crowd.requests, ticket.request_id
        if not self._crowd.requests:
            self._outlook.stood_still(now)
        arrived = now if arrived is None else arrived
        refusal = self._refuse_for_number(ticket) or self._outlook.refuse_for_length(ticket, self.queue_limit_s)
        if refusal is not None:
            return [replace(refusal, at=now, times=Times(queue_s=now - arrived))]
        accepted = self._crowd.enter(ticket, arrived)
        late = self._outlook.made_late_by(accepted, now)
        if (refusal := self._outlook.refuse_for_deadline(ticket, late, now)) is not None:
            self._crowd.leave(ticket.request_id)
            return [replace(refusal, at=now, times=Times(queue_s=now - arrived))]
        if late:
            self._outlook.put_behind(accepted, late, now)  # it may wait; they may not
        accepted.promised = self._outlook.uncorrected(now)[ticket.request_id]
        return []

    def cancel(self, request_id: str, now: float) -> list[Event]:
        """End a request; one that is unknown, or has ended, is nobody's loss."""
        return self._end(request_id, End.CANCELLED, "cancelled by the caller", now)

    def expire(self, now: float) -> list[Event]:
        """End every request whose deadline has passed."""
        late = {
            name: r.ticket.deadline - r.submitted
            for name, r in self._crowd.requests.items()
            if r.ticket.deadline is not None and r.ticket.deadline <= now
        }
        words = "it was not done within {:.2f} s: allow more time, or ask for fewer steps"
        return [
            event for name, had_s in late.items() for event in self._end(name, End.EXPIRED, words.format(had_s), now)
        ]

    def next_deadline(self) -> float | None:
        """When `expire` will next have something to do, if nothing else happens."""
        deadlines = [accepted.ticket.deadline for accepted in self._crowd.requests.values()]
        return min((deadline for deadline in deadlines if deadline is not None), default=None)

    def whereabouts(self, request_ids: Iterable[str], now: float) -> dict[str, Whereabouts]:
        """How far these requests are, and when they will start and be done; those that have ended are left out."""
        known = [request_id for request_id in request_ids if request_id in self._crowd.requests]
        if not known:
            return {}
        places, forecasts = self._outlook.places(now), self._outlook.requests(now)
        found = {}
        for request_id in known:
            images = self._crowd.requests[request_id].images
            position = max((places[image] for image in images if image in places), default=None)
            call = min(self._crowd.call(image) for image in images)
            expected = forecasts[request_id]
            found[request_id] = Whereabouts(position, call, expected.start_in_s, expected.finish_in_s)
        return found

    def standing(self, now: float, most_waiting: int) -> Standing:
        """Everybody's place, and what is foreseen for him; of the requests that wait the first `most_waiting` to board."""
        forecasts, numbers, first = self._outlook.images(now), Counter[str](), dict[str, ImageId]()
        for image in self._outlook.places(now):
            numbers[image.request_id] += 1
            first.setdefault(image.request_id, image)
        seated = [
            SeatedImage(image, each.ticket, each.slot, each.call, each.boarded, forecasts[image].finish_in_s)
            for image, each in self._crowd.seated.items()
        ]
        waiting = []
        for request_id, image in itertools.islice(first.items(), most_waiting):
            accepted = self._crowd.requests[request_id]
            waiting.append(
                WaitingRequest(accepted.ticket, numbers[request_id], accepted.submitted, forecasts[image].start_in_s)
            )
        return Standing(tuple(sorted(seated, key=lambda each: each.slot)), tuple(waiting))

    def plan(self, now: float) -> Plan | None:
        """The next turn, or None when there is nothing to do."""
        boards = self._board(now)
        steps = self._next_steps(now)
        decodes = self._next_decodes(steps)
        return Plan(boards, steps, decodes) if boards or steps or decodes else None

    def commit(self, plan: Plan, outcome: Outcome, now: float, seconds: float = 0.0) -> list[Event]:
        """Take note of a turn that was carried out, and took `seconds`. What was cancelled meanwhile is passed over."""
        self._crowd.changed()
        if outcome.overflowed is None and not outcome.failed:
            self._learn(plan, outcome, now, seconds)
        events: list[Event] = []
        for image, reason in outcome.failed.items():
            if image in self._crowd.seated:
                events += self._end(image.request_id, End.FAILED, reason, now)
        events += self._shrink(plan, outcome, now)
        for seat in plan.boards:
            if seat.image in self._crowd.seated:
                self._crowd.seated[seat.image].boarding = outcome.spent or NOTHING
        for step in plan.steps if outcome.overflowed not in ("boards", "steps") else ():
            if step.image in self._crowd.seated:
                self._crowd.stepped(step.image, step.call + 1, len(plan.steps))
        for seat in plan.decodes if outcome.overflowed is None else ():
            if seat.image in self._crowd.seated:
                events += self._decoded(seat.image, outcome, now)
        return events

    # Deciding.

    def _board(self, now: float) -> tuple[Seat, ...]:
        free = self._outlook.most_seated - len(self._crowd.seated)
        aboard = {image.request_id for image in self._crowd.seated}
        alone = any(self._crowd.requests[request_id].ticket.alone for request_id in aboard)
        boarding: list[ImageId] = []
        for image in self._outlook.in_order(self._crowd.waiting, now)[:free] if free > 0 else ():
            alone = alone or self._crowd.ticket(image).alone
            if alone and aboard - {image.request_id}:
                break  # whoever flies alone holds the others back until the wheel is empty
            boarding.append(image)
            aboard.add(image.request_id)
        for image in boarding:
            self._crowd.seat(image, now)
        return tuple(Seat(image, self._crowd.seated[image].slot) for image in boarding)

    def _next_steps(self, now: float) -> tuple[Step, ...]:
        by_shape: dict[ShapeClass, list[ImageId]] = {}
        for image, seated in self._crowd.seated.items():
            if not seated.drawn:
                by_shape.setdefault(seated.ticket.shape, []).append(image)
        if not by_shape:
            return ()
        num_seated = {shape: len(images) for shape, images in by_shape.items()}
        shape = next(iter(by_shape))
        if len(by_shape) > 1:
            running = [image for images in by_shape.values() for image in images]
            shape = self._crowd.ticket(self._outlook.in_order(running, now)[0]).shape
        shape = self._shares.next(num_seated, shape)
        chosen = self._as_many_as_pay(by_shape[shape], shape, now)
        cost_s = self.costs.step_s(shape, self._rows(chosen)) or 1.0  # nothing known yet: a call is a call
        self._shares.charge(shape, cost_s, num_seated[shape])
        seats = self._crowd.seated
        return tuple(Step(image, seats[image].slot, seats[image].call) for image in chosen)

    def _as_many_as_pay(self, images: list[ImageId], shape: ShapeClass, now: float) -> list[ImageId]:
        seated = self._crowd.seated.values()
        device = Device(
            rows_limit=self.costs.rows_to_try(shape),
            step_s=lambda rows: self.costs.step_s(shape, rows),
            decode_s=self.costs.decode_s(shape),
            share=len(images) / sum(not each.drawn for each in seated),
            is_full=len(seated) >= self._outlook.most_seated,
        )
        in_order = [self._outlook.expected(image, now) for image in self._outlook.in_order(images, now)]
        chosen = {each.image for each in together(in_order, device, now=0.0)[0]}
        return [image for image in images if image in chosen]

    def _rows(self, images: Iterable[ImageId]) -> int:
        return sum(self._crowd.ticket(image).rows for image in images)

    def _next_decodes(self, steps: Iterable[Step]) -> tuple[Seat, ...]:
        seats = self._crowd.seated
        about_to_be_drawn = [step.image for step in steps if step.call + 1 == seats[step.image].ticket.num_calls]
        ready = [image for image, seated in seats.items() if seated.drawn] + about_to_be_drawn
        if not ready:
            return ()
        shape = seats[ready[0]].ticket.shape
        alike = [image for image in ready if seats[image].ticket.shape == shape]
        limit = self._decode_limits.get(shape, self.decode_batch)
        return tuple(Seat(image, seats[image].slot) for image in alike[:limit])

    # What a turn taught, and how requests end.

    def _learn(self, plan: Plan, outcome: Outcome, now: float, seconds: float) -> None:
        """Feed the cost model; whoever was cancelled during the turn is not here any more, and such a turn teaches nothing.

        Where only the turn could be timed, decoding and encoding stay as they were measured at the start.
        """
        images = [part.image for parts in (plan.boards, plan.steps, plan.decodes) for part in parts]
        if seconds <= 0.0 or not outcome.timed or any(image not in self._crowd.seated for image in images):
            return
        spent = outcome.spent if outcome.spent is not None and outcome.spent.is_known else None
        models = {self._crowd.ticket(seat.image).shape.model for seat in plan.boards}
        if spent is not None and len(models) == 1 and spent.encode_s:
            self.costs.observe_encode(models.pop(), len(plan.boards), spent.encode_s)
        decoded = self._crowd.ticket(plan.decodes[0].image).shape if plan.decodes else None
        if spent is not None and decoded is not None and spent.decode_s:
            self.costs.observe_decode(decoded, len(plan.decodes), spent.decode_s)
        if plan.steps:
            shape, rows = self._crowd.ticket(plan.steps[0].image).shape, self._rows(step.image for step in plan.steps)
            if spent is not None:
                step_s = spent.step_s
            else:  # only the turn was timed
                decode_s = self.costs.decode_s(decoded, len(plan.decodes)) if decoded is not None else 0.0
                step_s = max(seconds - decode_s - outcome.boarding_s, 0.1 * seconds)
            self.costs.observe_step(shape, rows, step_s)
            self._outlook.stepped(shape, rows, seconds, now)

    def _shrink(self, plan: Plan, outcome: Outcome, now: float) -> list[Event]:
        """Make room in the memory: smaller batches from now on; only an image that does not fit alone fails."""
        parts: dict[Part, tuple[Seat | Step, ...]] = {
            "boards": plan.boards,
            "steps": plan.steps,
            "decodes": plan.decodes,
        }
        named = parts[outcome.overflowed] if outcome.overflowed is not None else ()
        images = [each.image for each in named if each.image in self._crowd.seated]
        if not images:
            return []
        shape, others = self._crowd.ticket(images[0]).shape, len(self._crowd.seated) - len(images)
        if len(named) == 1 and (outcome.overflowed != "boards" or others == 0):
            words = f"{shape.width_px}x{shape.height_px} does not fit the memory of the device, even alone"
            self._outlook.most_seated = self.num_slots  # what made the others few is gone
            return self._end(images[0].request_id, End.FAILED, words, now)
        match outcome.overflowed:
            case "boards":
                self._outlook.most_seated = max(others + len(named) // 2, 1)
                self._crowd.unseat(images)
            case "steps":
                # Whoever was cancelled meanwhile counts as the others do.
                rows = self._rows(images) * len(named) // len(images)
                self.costs.overflowed(shape, rows)
            case _:  # "decodes"
                self._decode_limits[shape] = len(named) // 2
        return []

    def _decoded(self, image: ImageId, outcome: Outcome, now: float) -> list[Event]:
        accepted, seated = self._crowd.requests[image.request_id], self._crowd.done(image)
        # Who leaves leaves room: a memory that was full once is tried again, and an empty one is as large as ever.
        more = self._outlook.most_seated + 1 if self._crowd.seated else self.num_slots
        self._outlook.most_seated = min(more, self.num_slots)
        accepted.times = Times(
            queue_s=seated.boarded - accepted.submitted,
            slot_s=now - seated.boarded,
            boarding=seated.boarding,
            decoding=outcome.spent or NOTHING,
            mean_batch=seated.company / seated.ticket.num_calls,
            num_calls=seated.ticket.num_calls,
        )
        events: list[Event] = [ImageDecoded(image)]
        if accepted.left:
            return events
        self._outlook.finished(accepted, now)
        return events + self._end(image.request_id, End.FINISHED, "", now)

    def _end(self, request_id: str, end: End, reason: str, now: float) -> list[Event]:
        if request_id not in self._crowd.requests:
            return []
        unfinished = None if end is End.FINISHED else self._crowd.times_so_far(request_id, now)
        accepted, num_unseated = self._crowd.leave(request_id)
        times = accepted.times if unfinished is None else unfinished
        return [RequestEnded(request_id, end, reason, times, num_unseated, at=now)]

    def _refuse_for_number(self, ticket: Ticket) -> RequestEnded | None:
        waiting, seated = len(self._crowd.waiting), len(self._crowd.seated)
        too_many = ticket.num_images + waiting - self.queue_limit - max(self._outlook.most_seated - seated, 0)
        if too_many <= 0:
            return None
        words = f"the queue is full: {waiting} images wait, {self.queue_limit} may; {ticket.num_images} more asked for"
        wait_s = self.drain_s * min(too_many / max(waiting + seated, 1), 1.0)  # until so many have left
        return RequestEnded(ticket.request_id, End.REFUSED, words, retry_after_s=wait_s)
