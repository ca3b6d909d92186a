"""Makes an engine's live views: one `EngineView`, with thumbnails beside it, for every `ViewRequest` of a subscriber.

Called by the loop's thread only. Without subscribers it only keeps a few numbers of each iteration. The sender waits
for pixels and packs them (`pending_view.py`). Seconds named `now` are monotonic, like the scheduler's; `at` is Unix
time.
"""

import abc
import math
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from noria.engine.live.pending_view import PendingView, TimedIteration
from noria.engine.live.shares import share_views
from noria.engine.live.sliding_stats import SlidingStats
from noria.engine.loop import EngineEvent, RequestEnded
from noria.engine.runtime import PreparedRequest, RequestT, Thumbnail
from noria.protocol.live_views import DepartureView, RatesView, SlotView, WaitingView
from noria.protocol.messages import EngineView, ViewRequest
from noria.scheduling.interface import Scheduler
from noria.scheduling.types import (
    FinishReason,
    WaitingRequestSnapshot,
)

MAX_KEPT = 256  # iterations, and departures: views lag by a few, and new subscribers see the last seconds
MAX_WAITING = 64  # requests in a view; a reader looks at no more
VIEW_INTERVAL_S = 0.2  # steps are visible at this rate, and each view costs the loop a forecast
MAX_VIEW_INTERVAL_S = 1.0  # however expensive views are
_MAX_TIME_SHARE = 0.01  # views' share of the loop's time: one of 64 slots takes 1.4 ms, with 256 images waiting 6 ms
_RATES_INTERVAL_S = 1.0
_EPSILON_S = 1e-6  # waits below this are rounding errors

SubscriberT = TypeVar("SubscriberT", bound=Hashable)
"""The identity of a subscriber."""


@dataclass(slots=True)
class Subscriber:
    """The wishes of a reader of views, and what it has seen."""

    pending: ViewRequest | None  # the unanswered request
    with_thumbnails: bool = False  # whether the last view included them
    last_iteration: int = -1  # the last one at the time of that view
    version: int = -1  # version of the state in that view
    num_departures: int = 0  # the total number of departures at that view


class LiveViewPublisher(abc.ABC, Generic[SubscriberT]):
    """Publishes the views of an engine of either kind to its subscribers."""

    def __init__(
        self,
        incarnation: str,
        scheduler: Scheduler[Any],
        find_request: Callable[[str], PreparedRequest],
        now: float,
        slots_source: str = "set",
    ) -> None:
        """`find_request` returns a request that has not ended, by its id in the scheduler."""
        self._slots_source = slots_source
        self._incarnation, self._scheduler, self._find_request = incarnation, scheduler, find_request
        self._stats = SlidingStats(scheduler.num_slots, now)
        self._last_rates: tuple[float, RatesView | None, Mapping[str, float]] = (now, None, {})
        self._iterations: deque[TimedIteration] = deque(maxlen=MAX_KEPT)
        self._departures: deque[DepartureView] = deque(maxlen=MAX_KEPT)
        self._num_departures = 0  # in total
        self._last_iteration = 0  # the number of the last iteration
        self._subscribers: dict[SubscriberT, Subscriber] = {}
        self._version = 0  # incremented at every change of the state
        self._num_views = 0  # views made; one answers all requests that are due
        self._next_view_s = -math.inf  # the earliest time of the next view

    # Subscribers.

    def subscribe(self, subscriber_id: SubscriberT, view_request: ViewRequest) -> None:
        """Request a view. If an earlier request of the subscriber is unanswered, one view answers both."""
        if view_request.last_iteration is None or subscriber_id not in self._subscribers:
            self._subscribers[subscriber_id] = Subscriber(view_request, num_departures=self._num_departures)
        self._subscribers[subscriber_id].pending = view_request

    def unsubscribe(self, subscriber_id: SubscriberT) -> None:
        """Remove a subscriber."""
        self._subscribers.pop(subscriber_id, None)

    def on_event(self, event: EngineEvent[RequestT], now: float) -> None:
        """Record an event of a request."""
        self._version += 1
        if isinstance(event, RequestEnded) and event.event.finish_reason is FinishReason.FINISHED:
            self._stats.add_request(event.event.timings.queue_s + event.event.timings.slot_s, now)

    # Views.

    def wait_s(self, now: float) -> float | None:
        """Seconds until a view is due if no event happens before; None if none is."""
        waits = (
            self._wait_s(subscriber, now) for subscriber in self._subscribers.values() if subscriber.pending is not None
        )
        return min((wait for wait in waits if wait is not None), default=None)

    def _wait_s(self, subscriber: Subscriber, now: float) -> float | None:
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
        thumbnails = self._thumbnails()
        views = []
        for subscriber_id, subscriber, pending in ready:
            last_iteration = pending.last_iteration or 0
            num_new = self._num_departures - subscriber.num_departures
            departures = tuple(self._departures)[-num_new:] if num_new else ()
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
        rated_s, rates, device_shares = self._last_rates
        if rates is None or now - rated_s >= _RATES_INTERVAL_S - _EPSILON_S:
            rates, device_shares = self._stats.view(now), self._stats.shares(now)
            self._last_rates = now, rates, device_shares
        slots = self._slot_views(snapshot.running, now, at)
        return EngineView(
            incarnation=self._incarnation,
            captured_at=at,
            last_iteration=self._last_iteration,
            num_slots=self._scheduler.num_slots,
            slots_source=self._slots_source,
            slots=slots,
            waiting=tuple(self._waiting_view(each, now, at) for each in snapshot.waiting),
            num_waiting=self._scheduler.num_waiting,
            backlog_s=self._scheduler.backlog_s,
            iterations=(),
            departures=(),
            rates=rates,
            shares=share_views(device_shares, slots, snapshot.waiting_by_client, snapshot.evicted_by_client),
        )

    @abc.abstractmethod
    def _slot_views(self, running: Sequence[Any], now: float, at: float) -> tuple[SlotView, ...]:
        """Return the views of what runs, from the scheduler's snapshot."""

    def _thumbnails(self) -> tuple[tuple[int, str, Thumbnail], ...]:
        """Return the newest thumbnails, each with its slot and its request's id; texts have none."""
        return ()

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
            client=request.client,
            share_client=request.share_client,
        )
