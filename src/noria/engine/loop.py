"""The wheel: plan, execute, commit, again and again. Nothing is decided here, and nothing is computed.

Synchronous and single-threaded: `process.py` turns it on the device's thread, `noria generate`, the bench and the tests turn it
where they stand. What happens to a request is told to `deliver`, on the same thread, which must not wait.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic

from noria.engine.executor import Executor, P, Pixels
from noria.scheduling.plans import End, Event, ImageDecoded, Outcome, Plan, RequestEnded, ShapeClass, Ticket
from noria.scheduling.steps import StepScheduler


@dataclass(frozen=True)
class ImageReady(Generic[P]):
    """Image `index` of a request is decoded."""

    prepared: P
    index: int
    pixels: Pixels


@dataclass(frozen=True)
class Ended(Generic[P]):
    """A request ended; nothing more will come of it. `retry_after_s` is an estimate, given where it was refused."""

    prepared: P
    event: RequestEnded
    retry_after_s: float | None = None


@dataclass(frozen=True)
class Turn:
    """What one turn was, for metrics."""

    plan: Plan
    outcome: Outcome
    seconds: float


class Wheel(Generic[P]):
    """A scheduler and an executor, and the requests they share."""

    def __init__(
        self,
        scheduler: StepScheduler,
        executor: Executor[P],
        deliver: Callable[[ImageReady[P] | Ended[P]], None],
        clock: Callable[[], float],
    ) -> None:
        self.scheduler = scheduler
        self._executor = executor
        self._deliver = deliver
        self._clock = clock
        self._requests: dict[str, P] = {}
        self._seconds_a_call = 0.0  # smoothed: one image's share of a turn

    def submit(self, prepared: P, arrived: float | None = None) -> None:
        """Take a request in; it boards at the next turn, or is refused at once.

        Its waiting and its deadline count from when it `arrived`, monotonic seconds; left out, from now. Its id must not be in use.
        """
        request = prepared.request
        arrived = self._clock() if arrived is None else arrived
        deadline = arrived + request.timeout_s if math.isfinite(request.timeout_s) else None
        shape = ShapeClass(request.width_px, request.height_px)
        ticket = Ticket(request.request_id, shape, request.num_images, prepared.num_calls, deadline)
        assert request.request_id not in self._requests, request.request_id
        self._requests[request.request_id] = prepared
        self._executor.accept(prepared)
        self._tell(self.scheduler.submit(ticket, arrived))

    @property
    def drain_s(self) -> float:
        """About how long everything that was accepted will take."""
        return self._seconds_a_call * self.scheduler.calls_left

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
        outcome = self._executor.execute(plan)
        now = self._clock()
        if plan.steps:
            share = (now - started) / len(plan.steps)
            self._seconds_a_call = 0.9 * self._seconds_a_call + 0.1 * share if self._seconds_a_call else share
        self._tell(self.scheduler.commit(plan, outcome, now))
        return Turn(plan, outcome, now - started)

    def _tell(self, events: list[Event]) -> None:
        for event in events:
            match event:
                case ImageDecoded(image):
                    self._deliver(ImageReady(self._requests[image.request_id], image.index, self._executor.take(image)))
                case RequestEnded():
                    prepared = self._requests.pop(event.request_id)
                    self._executor.forget(event.request_id)
                    wait_s = self.drain_s if event.end is End.REFUSED else None
                    self._deliver(Ended(prepared, event, wait_s))
