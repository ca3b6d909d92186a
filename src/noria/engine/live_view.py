"""What an engine shows of its wheel, to those who follow it: one `WheelView` for every `Follow`, and the pictures beside it.

Called by the wheel's thread only, and cheap where nobody follows: of every turn a few numbers are kept. Waiting for pixels and packing
them is for the delivery (`cells.py`). Seconds named `now` are monotonic, as the scheduler's; `at` is Unix time.
"""

import math
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from noria.engine.loop import EngineEvent, ImageReady, Iteration, RequestClosed
from noria.engine.pending_view import PendingView, TimedIteration
from noria.engine.runtime import P, PreviewPixels
from noria.engine.sender import ERROR_CODE_BY_REASON
from noria.engine.sliding_stats import SlidingStats
from noria.protocol.live_views import DepartureView, IterationView, RatesView, SlotView, WaitingView
from noria.protocol.messages import EngineView, ViewRequest
from noria.protocol.request import ImageRequest, request_id_of
from noria.scheduling.step.scheduler import StepScheduler
from noria.scheduling.types import FinishReason, ImageId, IterationPlan, RunningImageSnapshot, WaitingRequestSnapshot

MAX_KEPT = 256  # turns, and images that left: a view is behind by a few, and who begins to watch sees the last seconds
MAX_WAITING = 64  # requests in a view: as many as anybody looks at
VIEW_INTERVAL_S = 0.2  # the eye sees steps at this pace, and a view takes the wheel's time (a forecast)
MAX_VIEW_INTERVAL_S = 1.0  # however long they take
_MAX_TIME_SHARE = 0.01  # of the wheel's time that views may take: 64 seats take 1.4 ms, with 256 in the queue 6 ms
_RATES_INTERVAL_S = 1.0
_PAUSED_S = 1.0  # without a step: two sizes that take turns have half a second each, and nobody is to see them blink
_PAUSED_ITERATIONS = 2  # of others, besides: one alone may last longer than that
_EPSILON_S = 1e-6  # what rounding may make of no wait at all

SubscriberT = TypeVar("SubscriberT", bound=Hashable)
"""Whoever follows."""


@dataclass(slots=True)
class _ImageState:
    """Where an image sits, when it stepped, and its last picture."""

    slot: int
    last_view: int  # in which it was seen last, or would have been for the first time
    last_step: int  # the number of turns with steps when it made its last one, or boarded
    last_step_s: float  # when that was
    thumbnail: PreviewPixels | None = None


@dataclass(slots=True)
class _Subscriber:
    pending: ViewRequest | None  # what is not answered yet
    with_thumbnails: bool = False  # whether the last answer had some
    last_iteration: int = -1  # of the turn that was the last one then
    version: int = -1  # of what it was shown
    num_departures: int = 0  # images that it was told have left


class LiveViewPublisher(Generic[SubscriberT]):
    """One wheel, as it is followed."""

    def __init__(
        self, incarnation: str, scheduler: StepScheduler, find_request: Callable[[str], ImageRequest], now: float
    ) -> None:
        """`request` finds a request that has not ended by the id that the scheduler knows."""
        self._incarnation, self._scheduler, self._find_request = incarnation, scheduler, find_request
        self._stats = SlidingStats(scheduler.num_slots, now)
        self._last_rates: tuple[float, RatesView | None] = (now, None)
        self._iterations: deque[TimedIteration] = deque(maxlen=MAX_KEPT)
        self._departures: deque[DepartureView] = deque(maxlen=MAX_KEPT)
        self._num_departures = 0  # ever
        self._last_iteration = 0  # of the last turn
        self._num_step_iterations = 0  # of the turns, those with steps
        self._in_iteration = False
        self._num_running = 0  # in the turn
        self._last_iteration_s = 0.0
        self._image_states: dict[ImageId, _ImageState] = {}
        self._subscribers: dict[SubscriberT, _Subscriber] = {}
        self._version = 0  # another one whenever there is something new to see
        self._num_views = 0  # views that were due to all who ask
        self._next_view_s = -math.inf  # when the next of them may be

    # Who follows.

    def subscribe(self, subscriber_id: SubscriberT, view_request: ViewRequest) -> None:
        """It asks for a view. Before the last was answered, it asks anew: one answers both."""
        if view_request.last_iteration is None or subscriber_id not in self._subscribers:
            self._subscribers[subscriber_id] = _Subscriber(view_request, num_departures=self._num_departures)
        self._subscribers[subscriber_id].pending = view_request

    def unsubscribe(self, subscriber_id: SubscriberT) -> None:
        """It is gone."""
        self._subscribers.pop(subscriber_id, None)

    # What happens.

    def on_plan(self, plan: IterationPlan, now: float) -> bool:
        """A turn begins; whether it is to have glimpses.

        That is when it will probably end with a view, and when somebody steps who was not seen in the last one: two shape classes
        that take turns must not be seen always the one and never the other. Who was shown the turn before asks for this one while it
        lasts.
        """
        self._in_iteration = True
        for assignment in plan.joins:
            self._image_states[assignment.image] = _ImageState(
                assignment.slot, self._num_views, self._num_step_iterations, now
            )
        self._num_running = len(self._image_states)
        if not any(self._wants_thumbnails(subscriber) for subscriber in self._subscribers.values()):
            return False
        if now + self._last_iteration_s >= self._next_view_s:
            return True
        return any(self._image_states[step.image].last_view < self._num_views for step in plan.steps)

    def _wants_thumbnails(self, subscriber: _Subscriber) -> bool:
        """Whether it does, or will have asked for them when the turn that begins is over."""
        if subscriber.pending is None:
            return subscriber.with_thumbnails and subscriber.last_iteration == self._last_iteration
        return subscriber.pending.with_thumbnails

    def on_event(self, event: EngineEvent[P], now: float) -> None:
        """Something became of a request."""
        self._version += 1
        if isinstance(event, ImageReady):
            self._stats.add_image(now)
            self._record_departure(ImageId(event.prepared.request.request_id, event.index), "ok")
        elif isinstance(event, RequestClosed):
            ended, timings = event.event, event.event.timings
            if ended.finish_reason is FinishReason.FINISHED:
                self._stats.add_request(timings.queue_s + timings.slot_s, now)
                return
            for index in range(event.prepared.request.num_images):
                self._record_departure(ImageId(ended.request_id, index), ERROR_CODE_BY_REASON[ended.finish_reason])

    def on_iteration(self, iteration: Iteration, now: float, at: float) -> None:
        """A turn was carried out, and what came of it has happened."""
        plan, oom_phase = iteration.plan, iteration.outcome.oom_phase
        rejoining = [
            assignment for assignment in plan.joins if oom_phase == "boards" and assignment.image in self._image_states
        ]
        for assignment in rejoining:
            del self._image_states[assignment.image]
        num_stepped = len(plan.steps) if oom_phase not in ("boards", "steps") else 0
        if num_stepped:
            self._num_step_iterations += 1
            for step in plan.steps:
                if (state := self._image_states.get(step.image)) is not None:
                    state.last_step, state.last_step_s = self._num_step_iterations, now
        self._in_iteration, self._last_iteration, self._version = False, self._last_iteration + 1, self._version + 1
        self._last_iteration_s = iteration.duration_s
        self._stats.add_iteration(iteration.duration_s, self._num_running, num_stepped, now)
        view = IterationView(
            number=self._last_iteration,
            started_at=at - iteration.duration_s,
            duration_s=iteration.duration_s,
            text_encode_s=0.0,  # these two are for who may wait for the device
            decode_s=0.0,
            num_joined=len(plan.joins) - len(rejoining),
            num_stepped=num_stepped,
            num_decoded=len(plan.decodes) if oom_phase is None else 0,
        )
        self._iterations.append(TimedIteration(view, iteration.outcome.phase_timings))
        for thumbnail in iteration.thumbnails:
            if (state := self._image_states.get(thumbnail.image)) is not None:
                state.last_view, state.thumbnail = self._num_views + 1, thumbnail

    def _record_departure(self, image: ImageId, outcome: str) -> None:
        state = self._image_states.pop(image, None)
        if state is not None:
            iteration = self._last_iteration + self._in_iteration
            self._departures.append(
                DepartureView(iteration, state.slot, request_id_of(image.request_id), image.index, outcome)
            )
            self._num_departures += 1

    # What is shown.

    def wait_s(self, now: float) -> float | None:
        """How long until somebody has to be shown something, if nothing happens before; None: for ever."""
        waits = (
            self._wait_s(subscriber, now) for subscriber in self._subscribers.values() if subscriber.pending is not None
        )
        return min((wait for wait in waits if wait is not None), default=None)

    def _wait_s(self, subscriber: _Subscriber, now: float) -> float | None:
        if (
            subscriber.pending is None
            or subscriber.pending.last_iteration is None
            or subscriber.version != self._version
        ):
            return max(self._next_view_s - now, 0.0)  # newcomers keep the pace too: they may come again and again
        is_decaying = self._stats.has_recent(
            self._last_rates[0]
        )  # what was shown of the last minute holds no more a second later
        return max(self._last_rates[0] + _RATES_INTERVAL_S - now, 0.0) if is_decaying else None

    def views(self, now: float, at: float) -> list[tuple[SubscriberT, PendingView]]:
        """The answers that are due, each to whom it is for."""
        ready = [
            (subscriber_id, subscriber, subscriber.pending)
            for subscriber_id, subscriber in self._subscribers.items()
            if subscriber.pending is not None
            and (wait_s := self._wait_s(subscriber, now)) is not None
            and wait_s < _EPSILON_S
        ]
        if not ready:
            return []
        self._num_views, self._next_view_s = self._num_views + 1, now + VIEW_INTERVAL_S
        full_view = self._build_view(now, at)
        states = sorted(self._image_states.values(), key=lambda state: state.slot)
        thumbnails = tuple((state.slot, state.thumbnail) for state in states if state.thumbnail is not None)
        answers = []
        for subscriber_id, subscriber, pending in ready:
            last_iteration = pending.last_iteration or 0
            view = msgspec.structs.replace(
                full_view, left=_last(self._departures, self._num_departures - subscriber.num_departures)
            )
            iterations = tuple(iteration for iteration in self._iterations if iteration.view.number > last_iteration)
            answers.append(
                (subscriber_id, PendingView(view, iterations, thumbnails if pending.with_thumbnails else ()))
            )
            subscriber.pending, subscriber.with_thumbnails, subscriber.last_iteration = (
                None,
                pending.with_thumbnails,
                self._last_iteration,
            )
            subscriber.version, subscriber.num_departures = self._version, self._num_departures
        return answers

    def record_cost(self, seconds: float) -> None:
        """What the last views took of the wheel's time: the next ones come so much later that it stays a small share."""
        self._next_view_s += min(max(seconds / _MAX_TIME_SHARE, VIEW_INTERVAL_S), MAX_VIEW_INTERVAL_S) - VIEW_INTERVAL_S

    def _build_view(self, now: float, at: float) -> EngineView:
        snapshot = self._scheduler.snapshot(now, MAX_WAITING)
        rated_s, rates = self._last_rates
        if rates is None or now - rated_s >= _RATES_INTERVAL_S - _EPSILON_S:
            rates = self._stats.view(now)
            self._last_rates = now, rates
        return EngineView(
            incarnation=self._incarnation,
            captured_at=at,
            last_iteration=self._last_iteration,
            num_slots=self._scheduler.num_slots,
            slots=tuple(self._slot_view(each, now, at) for each in snapshot.running),
            waiting=tuple(self._waiting_view(each, now, at) for each in snapshot.waiting),
            num_waiting=self._scheduler.num_waiting,
            backlog_s=self._scheduler.backlog_s,
            iterations=(),
            departures=(),
            rates=rates,
        )

    def _slot_view(self, each: RunningImageSnapshot, now: float, at: float) -> SlotView:
        request, schedulable = self._find_request(each.image.request_id), each.request
        return SlotView(
            slot=each.slot,
            request_id=request_id_of(request.request_id),
            index=each.image.index,
            model=request.model,
            width_px=request.width_px,
            height_px=request.height_px,
            scheduler=request.scheduler,
            guidance_scale=request.guidance_scale,
            num_steps=request.num_steps,
            call=each.call,
            num_calls=schedulable.num_calls,
            priority=request.priority,
            joined_at=at + each.joined_at - now,
            deadline_at=None if schedulable.deadline is None else at + schedulable.deadline - now,
            finish_at=at + each.finish_in_s,
            paused=self._is_paused(each.image, now),
        )

    def _is_paused(self, image: ImageId, now: float) -> bool:
        state = self._image_states.get(image)
        if state is None:
            return False
        return (
            self._num_step_iterations - state.last_step >= _PAUSED_ITERATIONS and now - state.last_step_s >= _PAUSED_S
        )

    def _waiting_view(self, each: WaitingRequestSnapshot, now: float, at: float) -> WaitingView:
        request, schedulable = self._find_request(each.request.request_id), each.request
        return WaitingView(
            request_id=request_id_of(request.request_id),
            num_images=each.num_images,
            model=request.model,
            width_px=request.width_px,
            height_px=request.height_px,
            scheduler=request.scheduler,
            guidance_scale=request.guidance_scale,
            num_steps=request.num_steps,
            priority=request.priority,
            arrived_at=at + each.arrived_at - now,
            start_at=at + each.start_in_s,
            deadline_at=None if schedulable.deadline is None else at + schedulable.deadline - now,
        )


def _last(departures: Iterable[DepartureView], count: int) -> tuple[DepartureView, ...]:
    return tuple(departures)[-count:] if count else ()
