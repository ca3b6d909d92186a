"""Live views of an engine whose images step in one running batch, with thumbnails of them."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from noria.engine.live.pending_view import TimedIteration
from noria.engine.live.publisher import LiveViewPublisher, Subscriber, SubscriberT
from noria.engine.loop import EngineEvent, Iteration, RequestEnded, RequestHandedOver, ResultReady
from noria.engine.runtime import PreparedRequest, RequestT, StepRequest, Thumbnail
from noria.engine.sender import ERROR_CODE_BY_REASON, MOVED
from noria.protocol.live_views import CallSizeView, DepartureView, IterationView, SlotView
from noria.scheduling.interface import StepwiseScheduler
from noria.scheduling.types import UNTIL_JOINED, FinishReason, ItemId, IterationPlan, RunningImageSnapshot

_PAUSED_S = 1.0  # without a step; two sizes that alternate get half a second each, and must not flicker as paused
_PAUSED_ITERATIONS = 2  # iterations of other images, in addition, because a single one may last longer than that


@dataclass(slots=True)
class _ImageState:
    """An image's slot, its last step, and its last thumbnail."""

    slot: int
    last_view: int  # the number of the view that had its newest thumbnail; at first of the view before it joined
    last_step: int  # the number of iterations with steps when it last stepped, or joined
    last_step_s: float  # the time of that, in monotonic seconds
    thumbnail: Thumbnail | None = None


class StepLiveView(LiveViewPublisher[SubscriberT]):
    """Publishes the views of one engine to its subscribers."""

    def __init__(
        self,
        incarnation: str,
        scheduler: StepwiseScheduler,
        find_request: Callable[[str], StepRequest],
        now: float,
        slots_source: str = "set",
    ) -> None:
        super().__init__(incarnation, scheduler, find_request, now, slots_source)
        self._find_step_request = find_request
        self._num_step_iterations = 0  # iterations with steps
        self._in_iteration = False
        self._num_running = 0  # images in slots during the iteration
        self._call_sizes: tuple[CallSizeView, ...] = ()  # call sizes of the iteration
        self._last_iteration_s = 0.0
        self._image_states: dict[ItemId, _ImageState] = {}
        self._evicted_states: dict[ItemId, _ImageState] = {}

    def on_plan(self, plan: IterationPlan, now: float) -> bool:
        """An iteration begins; returns whether it should make thumbnails.

        It should if a view will probably be due at its end, or if an image steps that the last view had no new
        thumbnail of: otherwise, of two batch keys that alternate, one might never be seen. Subscribers that got the
        last iteration's view count as asking for this one, because they ask for it while it runs.
        """
        self._in_iteration = True
        for evicted in plan.evictions:
            self._evicted_states[evicted.image] = self._image_states.pop(evicted.image)
        for image, slot in plan.joins:
            before = self._evicted_states.pop(image, None)
            thumbnail = None if before is None else before.thumbnail
            self._image_states[image] = _ImageState(slot, self._num_views, self._num_step_iterations, now, thumbnail)
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
            prepared = self._find_step_request(step.image.attempt_id)
            if prepared.call_size is None:
                return ()
            num_rows[prepared.batch_key.width_px, prepared.batch_key.height_px] += prepared.num_rows
        if len(num_rows) < 2:
            return ()
        return tuple(CallSizeView(*size, num_rows[size]) for size in sorted(num_rows, key=math.prod, reverse=True))

    def _wants_thumbnails(self, subscriber: Subscriber) -> bool:
        """Whether it asks for thumbnails, or will probably have done so by the end of this iteration."""
        if subscriber.pending is None:
            return subscriber.with_thumbnails and subscriber.last_iteration == self._last_iteration
        return subscriber.pending.with_thumbnails

    def on_event(self, event: EngineEvent[RequestT], now: float) -> None:
        """Record an event of a request."""
        super().on_event(event, now)
        if isinstance(event, ResultReady):
            self._stats.add_image(now)
            self._record_departure(event.prepared, event.index, "ok")
        elif isinstance(event, RequestEnded) and event.event.finish_reason is not FinishReason.FINISHED:
            for index in range(event.prepared.request.payload.num_results):
                self._record_departure(event.prepared, index, ERROR_CODE_BY_REASON[event.event.finish_reason])
        elif isinstance(event, RequestHandedOver):
            for each in event.released.images:
                self._record_departure(event.prepared, each.image.index, MOVED)

    def on_iteration(self, iteration: Iteration, now: float, at: float) -> None:
        """Record an executed iteration, after its events."""
        plan, oom_phase = iteration.plan, iteration.outcome.oom_phase
        rejoining = [
            assignment
            for assignment in plan.joins
            if oom_phase in UNTIL_JOINED and assignment.image in self._image_states
        ]
        for assignment in rejoining:
            rejoins = self._image_states.pop(assignment.image)
            if assignment in plan.returns:
                self._evicted_states[assignment.image] = rejoins
        for evicted in plan.evictions if oom_phase == "evictions" else ():
            if (stays := self._evicted_states.pop(evicted.image, None)) is not None:
                self._image_states[evicted.image] = stays
        num_stepped = len(plan.steps) if oom_phase in (None, "decodes") else 0
        if num_stepped:
            self._num_step_iterations += 1
            for step in plan.steps:
                if (state := self._image_states.get(step.image)) is not None:
                    state.last_step, state.last_step_s = self._num_step_iterations, now
        self._in_iteration, self._last_iteration, self._version = False, self._last_iteration + 1, self._version + 1
        self._last_iteration_s = iteration.duration_s
        self._stats.add_iteration(iteration.duration_s, self._num_running, num_stepped, iteration.images_by_client, now)
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
        image = ItemId(request.attempt_id, index)
        state = self._image_states.pop(image, None) or self._evicted_states.pop(image, None)
        if state is not None:
            iteration = self._last_iteration + self._in_iteration
            self._departures.append(
                DepartureView(iteration, state.slot, request.request_id, index, outcome, request.client)
            )
            self._num_departures += 1

    def _thumbnails(self) -> tuple[tuple[int, str, Thumbnail], ...]:
        return tuple(
            (state.slot, self._find_request(state.thumbnail.image.attempt_id).request.request_id, state.thumbnail)
            for state in sorted(self._image_states.values(), key=lambda state: state.slot)
            if state.thumbnail is not None
        )

    def _slot_views(self, running: Sequence[RunningImageSnapshot], now: float, at: float) -> tuple[SlotView, ...]:
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
            client=request.client,
            share_client=request.share_client,
        )

    def _is_paused(self, image: ItemId, now: float) -> bool:
        state = self._image_states.get(image)
        if state is None:
            return False
        return (
            self._num_step_iterations - state.last_step >= _PAUSED_ITERATIONS and now - state.last_step_s >= _PAUSED_S
        )
