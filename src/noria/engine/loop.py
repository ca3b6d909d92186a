"""The wheel: plan, execute, commit, again and again. Nothing is decided here, and nothing is computed.

Synchronous and single-threaded: `process.py` turns it on the device's thread, `noria generate`, the bench and the tests turn it
where they stand. What happens to a request is told to `deliver`, on the same thread, which must not wait.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic

from noria.engine.executor import Executor, P, Pixels, Prepared, PreviewPixels
from noria.request import ImageRequest
from noria.scheduling.plans import (
    Event,
    ImageDecoded,
    Outcome,
    Plan,
    RequestEnded,
    ShapeClass,
    Ticket,
    Whereabouts,
)
from noria.scheduling.steps import StepScheduler

_BETWEEN_NEWS_S = 0.1  # to watchers: a forecast takes the wheel's time


@dataclass(frozen=True)
class Moved(Generic[P]):
    """How far a request is: once when it is accepted, and now and then if it is watched."""

    prepared: P
    whereabouts: Whereabouts


@dataclass(frozen=True)
class PreviewReady(Generic[P]):
    """What an image is going to be."""

    prepared: P
    preview: PreviewPixels


@dataclass(frozen=True)
class ImageReady(Generic[P]):
    """Image `index` of a request is decoded."""

    prepared: P
    index: int
    pixels: Pixels


@dataclass(frozen=True)
class Ended(Generic[P]):
    """A request ended; nothing more will come of it."""

    prepared: P
    event: RequestEnded


Happening = Moved[P] | PreviewReady[P] | ImageReady[P] | Ended[P]


@dataclass(frozen=True)
class Turn:
    """What one turn was, for metrics and for who watches the wheel."""

    plan: Plan
    outcome: Outcome
    seconds: float
    stepped: ShapeClass | None = None  # of the images that did; None where no step was done
    num_boarded: int = 0  # images that got a slot, also those that failed in this turn; not who had to give it back
    glimpses: Sequence[PreviewPixels] = ()  # of all of them, where they were asked for


class Wheel(Generic[P]):
    """A scheduler and an executor, and the requests they share."""

    def __init__(
        self,
        scheduler: StepScheduler,
        executor: Executor[P],
        deliver: Callable[[Happening[P]], None],
        clock: Callable[[], float],
        about_to: Callable[[Plan], bool] = lambda _plan: False,
    ) -> None:
        """`about_to` is called with each plan before anything of it is done, and says whether the turn has glimpses."""
        self.scheduler = scheduler
        self._executor = executor
        self._deliver = deliver
        self._clock = clock
        self._about_to = about_to
        self._requests: dict[str, P] = {}
        self._watched: set[str] = set()
        self._last_news = -math.inf

    def submit(self, prepared: P, arrived: float | None = None) -> None:
        """Take a request in; it boards at the next turn, or is refused at once.

        Its waiting and its deadline count from when it `arrived`, monotonic seconds; left out, from now. Its id must not be in use.
        """
        request = prepared.request
        now = self._clock()
        arrived = now if arrived is None else arrived
        assert request.request_id not in self._requests, request.request_id
        self._requests[request.request_id] = prepared
        self._executor.accept(prepared)
        self._tell(self.scheduler.submit(_ticket(prepared, arrived), now, arrived))
        if request.request_id in self._requests:  # not refused
            self._tell_whereabouts([request.request_id], now)
            if request.watched:
                self._watched.add(request.request_id)

    def cancel(self, request_id: str) -> None:
        """Forget a request; it is gone from the next turn."""
        self._tell(self.scheduler.cancel(request_id, self._clock()))

    def turn(self) -> Turn | None:
        """Carry out one turn, or return None when there is nothing to do."""
        started = self._clock()
        self._tell(self.scheduler.expire(started))
        plan = self.scheduler.plan(started)
        if plan is None:
            return None
        glimpse = self._about_to(plan)
        shape = _shape(self._requests[plan.steps[0].image.request_id].request) if plan.steps else None
        outcome = self._executor.execute(plan, glimpse=glimpse)
        now = self._clock()
        for preview in self._executor.previews():
            if preview.image.request_id in self._requests:
                self._deliver(PreviewReady(self._requests[preview.image.request_id], preview))
        self._tell(self.scheduler.commit(plan, outcome, now, now - started))
        if self._watched and now - self._last_news >= _BETWEEN_NEWS_S:
            self._last_news = now
            self._tell_whereabouts(self._watched, now)
        boarded = [
            seat
            for seat in plan.boards
            if outcome.overflowed != "boards" or seat.image.request_id not in self._requests  # failed, even alone
        ]
        stepped = shape if outcome.overflowed not in ("boards", "steps") else None
        glimpses = self._executor.glimpses() if glimpse else []
        return Turn(plan, outcome, now - started, stepped, len(boarded), glimpses)

    def request(self, request_id: str) -> ImageRequest:
        """One that has not ended."""
        return self._requests[request_id].request

    def _tell_whereabouts(self, request_ids: Iterable[str], now: float) -> None:
        for request_id, whereabouts in self.scheduler.whereabouts(request_ids, now).items():
            self._deliver(Moved(self._requests[request_id], whereabouts))

    def _tell(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case ImageDecoded(image):
                    self._deliver(ImageReady(self._requests[image.request_id], image.index, self._executor.take(image)))
                case RequestEnded():
                    prepared = self._requests.pop(event.request_id)
                    self._executor.forget(event.request_id)
                    self._watched.discard(event.request_id)
                    self._deliver(Ended(prepared, event))


def _ticket(prepared: Prepared, arrived: float) -> Ticket:
    """What the scheduler may know of a request that arrived then."""
    request = prepared.request
    due = arrived + request.deadline_s if request.deadline_s is not None else None
    ends = [arrived + request.timeout_s, *([due] if due is not None else [])]
    return Ticket(
        request_id=request.request_id,
        shape=_shape(request),
        num_images=request.num_images,
        num_calls=prepared.num_calls,
        deadline=min(ends) if math.isfinite(min(ends)) else None,
        due=due,
        rows=2 if request.guided else 1,
        priority=request.priority,
        alone=request.alone,
    )


def _shape(request: ImageRequest) -> ShapeClass:
    return ShapeClass(request.width_px, request.height_px, request.model)
