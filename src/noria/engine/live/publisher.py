"""Makes an engine's live views: one `EngineView`, with thumbnails beside it, for every `ViewRequest` of a subscriber.

Called by the loop's thread only. Without subscribers it only keeps a few numbers of each iteration. The sender waits
for pixels and packs them (`pending_view.py`). Seconds named `now` are monotonic, like the scheduler's; `at` is Unix
time.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from noria.engine.live.pending_view import PendingView, TimedIteration
from noria.engine.live.sliding_stats import SlidingStats
from noria.engine.loop import EngineEvent, Iteration, RequestEnded, RequestHandedOver, ResultReady
from noria.engine.runtime import PreparedRequest, RequestT, Thumbnail
from noria.engine.sender import ERROR_CODE_BY_REASON, MOVED
from noria.protocol.live_views import CallSizeView, DepartureView, IterationView, RatesView, SlotView, WaitingView
from noria.protocol.messages import EngineView, ViewRequest
from noria.scheduling.interface import Scheduler
from noria.scheduling.types import (
    FinishReason,
    ItemId,
    IterationPlan,
    RunningImageSnapshot,
    WaitingRequestSnapshot,
)

MAX_KEPT = 256  # iterations, and departures: views lag by a few, and new subscribers see the last seconds
MAX_WAITING = 64  # requests in a view; a reader looks at no more
VIEW_INTERVAL_S = 0.2  # steps are visible at this rate, and each view costs the loop a forecast
MAX_VIEW_INTERVAL_S = 1.0  # however expensive views are
_MAX_TIME_SHARE = 0.01  # of the loop's time: a view of 64 slots takes 1.4 ms, with 256 images waiting 6 ms
_RATES_INTERVAL_S = 1.0
_PAUSED_S = 1.0  # without a step; two sizes that alternate get half a second each, and must not flicker as paused
_PAUSED_ITERATIONS = 2  # of other images, in addition, because a single one may last longer than that
_EPSILON_S = 1e-6  # waits below this are rounding errors

SubscriberT = TypeVar("SubscriberT", bound=Hashable)
"""The identity of a subscriber."""


@dataclass(slots=True)
class _ImageState:
    """An image's slot, its last step, and its last thumbnail."""

    slot: int
    last_view: int  # the number of the view that had its newest thumbnail; at first of the view before it joined
    last_step: int  # the number of iterations with steps when it last stepped, or joined
    last_step_s: float  # the time of that, in monotonic seconds
    thumbnail: Thumbnail | None = None


@dataclass(slots=True)
class _Subscriber:
    pending: ViewRequest | None  # the unanswered request
    with_thumbnails: bool = False  # whether the last view included them
    last_iteration: int = -1  # the last one at the time of that view
    version: int = -1  # of the state in that view
    num_departures: int = 0  # the total number of departures at that view


class LiveViewPublisher(Generic[SubscriberT]):
    """Publishes the views of one engine to its subscribers."""

    def __init__(
        self,
        incarnation: str,
        scheduler: Scheduler[Any, Any],
        find_request: Callable[[str], PreparedRequest],
        now: float,
    ) -> None:
        """`find_request` returns a request that has not ended, by its id in the scheduler."""
        self._incarnation, self._scheduler, self._find_request = incarnation, scheduler, find_request
        self._stats = SlidingStats(scheduler.num_slots, now)
        self._last_rates: tuple[float, RatesView | None] = (now, None)
        self._iterations: deque[TimedIteration] = deque(maxlen=MAX_KEPT)
        self._departures: deque[DepartureView] = deque(maxlen=MAX_KEPT)
        self._num_departures = 0  # in total
        self._last_iteration = 0  # the number of the last iteration
        self._num_step_iterations = 0  # iterations with steps
        self._in_iteration = False
        self._num_running = 0  # images in slots during the iteration
        self._call_sizes: tuple[CallSizeView, ...] = ()  # of the iteration
        self._last_iteration_s = 0.0
        self._image_states: dict[ItemId, _ImageState] = {}
        self._subscribers: dict[SubscriberT, _Subscriber] = {}
        self._version = 0  # incremented at every change of the state
        self._num_views = 0  # views made; one answers all requests that are due
        self._next_view_s = -math.inf  # the earliest time of the next view

    # Subscribers.

    def subscribe(self, subscriber_id: SubscriberT, view_request: ViewRequest) -> None:
        """Request a view. If an earlier request of the subscriber is unanswered, one view answers both."""
        if view_request.last_iteration is None or subscriber_id not in self._subscribers:
            self._subscribers[subscriber_id] = _Subscriber(view_request, num_departures=self._num_departures)
        self._subscribers[subscriber_id].pending = view_request

    def unsubscribe(self, subscriber_id: SubscriberT) -> None:
        """Remove a subscriber."""
        self._subscribers.pop(subscriber_id, None)

    # Inputs from the loop.

    def on_plan(self, plan: IterationPlan, now: float) -> bool:
        """An iteration begins; returns whether it should make thumbnails.

        It should if a view will probably be due at its end, or if an image steps that the last view had no new
        thumbnail of: otherwise, of two batch keys that alternate, one might never be seen. Subscribers that got the
        last iteration's view count as asking for this one, because they ask for it while it runs.
        """
        self._in_iteration = True
        for assignment in plan.joins:
            self._image_states[assignment.image] = _ImageState(
                assignment.slot, self._num_views, self._num_step_iterations, now
            )
        self._num_running = len(self._image_states)
        self._call_sizes = self._sizes_in_call(plan)
        if not any(self._wants_thumbnails(subscriber) for subscriber in self._subscribers.values()):
            return False
        if now + self._last_iteration_s >= self._next_view_s:
            return True
        return any(self._image_states[step.image].last_view < self._num_views for step in plan.steps)

    def _sizes_in_call(self, plan: IterationPlan) -> tuple[CallSizeView, ...]:
        """Return the rows of each size in the call, the largest first, if there are several."""
        num_rows: Counter[tuple[int, int]] = Counter()
        for step in plan.steps:
            prepared = self._find_request(step.image.attempt_id)
            if prepared.call_size is None:
                return ()
            num_rows[prepared.batch_key.width_px, prepared.batch_key.height_px] += prepared.num_rows
        if len(num_rows) < 2:
            return ()
        return tuple(CallSizeView(*size, num_rows[size]) for size in sorted(num_rows, key=math.prod, reverse=True))

    def _wants_thumbnails(self, subscriber: _Subscriber) -> bool:
        """Whether it asks for thumbnails, or will probably have done so by the end of this iteration."""
        if subscriber.pending is None:
            return subscriber.with_thumbnails and subscriber.last_iteration == self._last_iteration
        return subscriber.pending.with_thumbnails

    def on_event(self, event: EngineEvent[RequestT], now: float) -> None:
        """Record an event of a request."""
        self._version += 1
        if isinstance(event, ResultReady):
            self._stats.add_image(now)
            self._record_departure(event.prepared, event.index, "ok")
        elif isinstance(event, RequestEnded):
            ended, timings = event.event, event.event.timings
            if ended.finish_reason is FinishReason.FINISHED:
                self._stats.add_request(timings.queue_s + timings.slot_s, now)
                return
            for index in range(event.prepared.num_images):
                self._record_departure(event.prepared, index, ERROR_CODE_BY_REASON[ended.finish_reason])
        elif isinstance(event, RequestHandedOver):
            for each in event.released.images:
                self._record_departure(event.prepared, each.image.index, MOVED)

    def on_iteration(self, iteration: Iteration, now: float, at: float) -> None:
        """Record an executed iteration, after its events."""
        plan, oom_phase = iteration.plan, iteration.outcome.oom_phase
        rejoining = [
            assignment
            for assignment in plan.joins
            if oom_phase in ("encodes", "joins") and assignment.image in self._image_states
        ]
        for assignment in rejoining:
            del self._image_states[assignment.image]
        num_stepped = len(plan.steps) if oom_phase in (None, "decodes") else 0
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
            text_encode_s=0.0,  # these three are filled in by the sender, which may wait for the device
            decode_s=0.0,
            image_encode_s=0.0,
            num_joined=len(plan.joins) - len(rejoining),
            num_stepped=num_stepped,
            num_decoded=len(plan.decodes) if oom_phase is None else 0,
            call_sizes=self._call_sizes if num_stepped else (),
        )
        self._iterations.append(TimedIteration(view, iteration.outcome.phase_timings))
        for thumbnail in iteration.thumbnails:
            if (state := self._image_states.get(thumbnail.image)) is not None:
                state.last_view, state.thumbnail = self._num_views + 1, thumbnail

    def _record_departure(self, prepared: PreparedRequest, index: int, outcome: str) -> None:
        request = prepared.request
        state = self._image_states.pop(ItemId(request.attempt_id, index), None)
        if state is not None:
            iteration = self._last_iteration + self._in_iteration
            self._departures.append(DepartureView(iteration, state.slot, request.request_id, index, outcome))
            self._num_departures += 1

    # Views.

    def wait_s(self, now: float) -> float | None:
        """Seconds until a view is due if no event happens before; None if none is."""
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
            return max(self._next_view_s - now, 0.0)  # also for new subscribers, which may resubscribe at any rate
        # Rates over the last minute change with time, even without events.
        is_decaying = self._stats.has_recent(self._last_rates[0])
        return max(self._last_rates[0] + _RATES_INTERVAL_S - now, 0.0) if is_decaying else None

    def views(self, now: float, at: float) -> list[tuple[SubscriberT, PendingView]]:
        """The views that are due, each with its subscriber."""
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
        thumbnails = tuple(
            (state.slot, self._find_request(state.thumbnail.image.attempt_id).request.request_id, state.thumbnail)
            for state in states
            if state.thumbnail is not None
        )
        views = []
        for subscriber_id, subscriber, pending in ready:
            last_iteration = pending.last_iteration or 0
            departures = _last(self._departures, self._num_departures - subscriber.num_departures)
            view = msgspec.structs.replace(full_view, departures=departures)
            iterations = tuple(iteration for iteration in self._iterations if iteration.view.number > last_iteration)
            views.append((subscriber_id, PendingView(view, iterations, thumbnails if pending.with_thumbnails else ())))
            subscriber.pending, subscriber.with_thumbnails = None, pending.with_thumbnails
            subscriber.last_iteration = self._last_iteration
            subscriber.version, subscriber.num_departures = self._version, self._num_departures
        return views

    def record_cost(self, seconds: float) -> None:
        """Delay the next view, as the last one took `seconds`, so that views stay a small share of the loop's time."""
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
            slots=self._slot_views(snapshot.running, now, at),
            waiting=tuple(self._waiting_view(each, now, at) for each in snapshot.waiting),
            num_waiting=self._scheduler.num_waiting,
            backlog_s=self._scheduler.backlog_s,
            iterations=(),
            departures=(),
            rates=rates,
        )

    def _slot_views(self, running: Sequence[Any], now: float, at: float) -> tuple[SlotView, ...]:
        """What runs, from the scheduler's snapshot."""
        return tuple(self._slot_view(each, now, at) for each in running)

    def _slot_view(self, each: RunningImageSnapshot, now: float, at: float) -> SlotView:
        prepared, schedulable = self._find_request(each.image.attempt_id), each.request
        request = prepared.request
        return SlotView(
            slot=each.slot,
            request_id=request.request_id,
            index=each.image.index,
            model=request.model,
            settings=prepared.settings_view,
            call=each.call,
            num_calls=schedulable.num_calls,
            priority=request.priority,
            joined_at=at + each.joined_at - now,
            deadline_at=None if schedulable.deadline is None else at + schedulable.deadline - now,
            finish_at=at + each.finish_in_s,
            paused=self._is_paused(each.image, now),
        )

    def _is_paused(self, image: ItemId, now: float) -> bool:
        state = self._image_states.get(image)
        if state is None:
            return False
        return (
            self._num_step_iterations - state.last_step >= _PAUSED_ITERATIONS and now - state.last_step_s >= _PAUSED_S
        )

    def _waiting_view(self, each: WaitingRequestSnapshot, now: float, at: float) -> WaitingView:
        prepared, schedulable = self._find_request(each.request.attempt_id), each.request
        request = prepared.request
        return WaitingView(
            request_id=request.request_id,
            num_images=each.num_images,
            model=request.model,
            settings=prepared.settings_view,
            priority=request.priority,
            arrived_at=at + each.arrived_at - now,
            start_at=at + each.start_in_s,
            deadline_at=None if schedulable.deadline is None else at + schedulable.deadline - now,
        )


def _last(departures: Iterable[DepartureView], count: int) -> tuple[DepartureView, ...]:
    return tuple(departures)[-count:] if count else ()
