"""The step scheduler: decides which image gets which slot, and what the next iteration does.

Rules:
  - An image joins as soon as a slot is free, at any iteration; nothing waits for a batch to fill. If slots are scarce,
    the policy decides: an image with a slot gives it up to one that would step earlier, and goes on later
    (`evictions.py`). So no request waits for a departure because of others that it precedes.
  - An iteration steps images of one batch key, or of several sizes where the model mixes them and that pays, and as
    many as pay off together (`step_selection.py`). The others are paused, which costs them nothing but time.
  - An iteration decodes at most `decode_batch` images, of one batch key, longest waiting first; the others keep their
    slots, which bounds how many wait. It encodes as many start images, of one batch key; images with others wait
    without a slot, and the next ones in the policy's order join. So an iteration delays a running image by at most one
    small decode and one small encode.
  - A request that would wait too long, miss its deadline, or make another miss an accepted one, is rejected at once
    (`admission.py`).
  - A request that is cancelled, expired or failed is not in the next plan, with none of its images.
  - What runs out of memory is tried again in smaller batches; only an image that does not fit alone fails.
  - An `exclusive` request joins an empty batch, and no other request joins until it has left.
  - Every `submit` ends in exactly one `RequestFinished`, unless `release` takes the request out for another engine.
    One that comes from another engine joins at the call that it has reached there.

Time is monotonic seconds and always an argument. What a slot holds and how a step is computed is not known here.
"""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from noria.protocol.model_spec import ModelKey
from noria.scheduling.costs import CostModel
from noria.scheduling.policies import Policy, fair, shares_fairly
from noria.scheduling.step.active_request import ActiveRequest
from noria.scheduling.step.admission import AdmissionControl
from noria.scheduling.step.evictions import EvictionSelector
from noria.scheduling.step.joining import select_joins
from noria.scheduling.step.predictor import CompletionPredictor
from noria.scheduling.step.request_table import RequestTable, cost_key, count_rows
from noria.scheduling.step.step_selection import StepSelector
from noria.scheduling.types import (
    NO_TIMINGS,
    BatchKey,
    FinishReason,
    ImageFinished,
    ItemId,
    IterationPlan,
    IterationResult,
    ReleasedImage,
    ReleasedRequest,
    RequestFinished,
    RequestProgress,
    RequestTimings,
    RunningImageSnapshot,
    SchedulableRequest,
    SchedulerEvent,
    SchedulerSnapshot,
    SlotAssignment,
    Step,
    WaitingRequestSnapshot,
)

# Waiting requests that are considered when a slot is free: of those whose start images cannot be encoded yet, as many
# can be overtaken.
_MAX_CANDIDATES = 256


class _Joins(NamedTuple):
    """The part of a plan that comes before its steps."""

    evictions: tuple[ReleasedImage, ...] = ()
    joins: tuple[SlotAssignment, ...] = ()
    encodes: tuple[SlotAssignment, ...] = ()
    returns: tuple[SlotAssignment, ...] = ()


@dataclass(slots=True)
class StepScheduler:
    """Plans iterations; executes nothing.

    Calls of `plan` and `commit` alternate; `submit`, `cancel` and `expire` can come between any two calls.
    """

    num_slots: int
    decode_batch: int = 4
    queue_limit: int = 256  # images that may wait beyond the free slots
    queue_limit_s: float = math.inf  # seconds of work that may be queued ahead of a request that has to wait
    policy: Policy = fair
    costs: CostModel = field(default_factory=CostModel)
    fair_width_slack: float = 0.2  # as `BatchLimits` has it, where the policy lets clients share the device
    _table: RequestTable = field(init=False)
    _predictor: CompletionPredictor = field(init=False)
    _admission: AdmissionControl = field(init=False)
    _step_selector: StepSelector = field(init=False)
    # Where `decode_batch` does not fit the memory.
    _decode_limits: dict[BatchKey, int] = field(init=False, default_factory=dict)
    _encode_limits: dict[BatchKey, int] = field(init=False, default_factory=dict)
    _evictions: EvictionSelector = field(init=False)

    def __post_init__(self) -> None:
        self._table = RequestTable(self.num_slots)
        self._predictor = CompletionPredictor(self._table, self.costs, self.policy, self.num_slots, self.decode_batch)
        if shares_fairly(self.policy):
            self._predictor.width_slack = self.fair_width_slack
        self._admission = AdmissionControl(self._table, self._predictor, self.queue_limit, self.queue_limit_s)
        self._step_selector = StepSelector(self._predictor)
        self._evictions = EvictionSelector(self._predictor)

    @property
    def num_waiting(self) -> int:
        """Number of images without a slot."""
        return self._table.num_waiting

    @property
    def num_running(self) -> int:
        """Number of images with a slot."""
        return len(self._table.running)

    @property
    def num_evicted(self) -> int:
        """Number of images that wait and have had a slot."""
        return len(self._table.evicted)

    def oldest_age_s(self, now: float) -> float:
        """Age of the oldest request with an image that waits for a slot; 0 if there is none."""
        oldest = self._table.oldest_arrival
        return 0.0 if oldest is None else max(0.0, now - oldest)

    @property
    def backlog_s(self) -> float:
        """Predicted duration of all accepted work if no further request arrives."""
        return self._predictor.backlog_s

    def submit(self, request: SchedulableRequest, now: float, arrived_at: float | None = None) -> list[RequestFinished]:
        """Accept a request or reject it at once. Its waiting time counts from `arrived_at`, by default from `now`."""
        assert request.attempt_id not in self._table.requests, request.attempt_id
        if not self._table.requests:
            self._predictor.decay(now)
        self._predictor.renew_costs()
        arrived_at = now if arrived_at is None else arrived_at
        rejection = self._admission.admit(request, arrived_at, now)
        if rejection is None:
            return []
        return [msgspec.structs.replace(rejection, finished_at=now, timings=RequestTimings(queue_s=now - arrived_at))]

    def cancel(self, attempt_id: str, now: float) -> list[RequestFinished]:
        """End a request; do nothing if it is unknown or has ended."""
        return self._finish(attempt_id, FinishReason.CANCELLED, "cancelled by the caller", now)

    def release(self, attempt_id: str, now: float) -> ReleasedRequest | None:
        """Forget a request, for another engine; None if it is unknown or has ended."""
        if attempt_id not in self._table.requests:
            return None
        timings, images = self._table.timings_so_far(attempt_id, now), self._table.held_by(attempt_id)
        self._table.remove(attempt_id)
        return ReleasedRequest(images, timings, now)

    def expire(self, now: float) -> list[RequestFinished]:
        """End every request whose `expires_at` has passed."""
        expired = {name: expires_at - arrived_at for name, expires_at, arrived_at in self._table.expired(now)}
        message = "it did not finish within {:.2f} s: allow more time, or request fewer steps"
        return [
            event
            for name, allowed_s in expired.items()
            for event in self._finish(name, FinishReason.EXPIRED, message.format(allowed_s), now)
        ]

    def progress(self, attempt_ids: Iterable[str], now: float) -> dict[str, RequestProgress]:
        """Return the progress of requests by id, with predictions; requests that have ended are left out."""
        known = [attempt_id for attempt_id in attempt_ids if attempt_id in self._table.requests]
        if not known:
            return {}
        forecasts, found = self._predictor.predict_requests(known, now), {}
        for attempt_id in known:
            active = self._table.requests[attempt_id]
            position = self._table.queue.ahead_of(active.last_rank).num_images if active.waiting else None
            call = min(self._table.next_call(image) for image in active.images)
            found[attempt_id] = RequestProgress(position, call, *forecasts[attempt_id])
        return found

    def snapshot(self, now: float, max_waiting: int) -> SchedulerSnapshot:
        """Return all running images and the first `max_waiting` waiting requests, with predictions."""
        forecasts = self._predictor.predict_running(now)
        running = [
            RunningImageSnapshot(
                image, each.request, each.slot, each.call, each.joined_at, forecasts[image].finish_in_s
            )
            for image, each in self._table.running.items()
        ]
        waiting = [
            WaitingRequestSnapshot(
                active.request,
                len(active.waiting),
                active.arrived_at,
                self._predictor.predict_first_waiting(active, now).start_in_s,
            )
            for active in self._first_waiting(now, max_waiting)
        ]
        by_slot = tuple(sorted(running, key=lambda each: each.slot))
        return SchedulerSnapshot(
            by_slot, tuple(waiting), dict(self._table.waiting_by_client), self._table.evicted_by_client()
        )

    def _first_waiting(self, now: float, max_requests: int) -> Iterable[ActiveRequest]:
        """Return the first requests with waiting images, in order."""
        found: dict[ActiveRequest, None] = {}
        for waiting in self._predictor.queue(now) if max_requests else ():
            found[waiting.active] = None
            if len(found) == max_requests:
                break
        return found

    def plan(self, now: float) -> IterationPlan | None:
        """Return the next iteration's plan, or None if there is nothing to do."""
        self._predictor.renew_costs()
        evictions, joins, encodes, returns = self._join(now)
        steps = tuple([Step(running.image, running.slot, running.call) for running in self._step_selector.select(now)])
        decodes = self._next_decodes(steps)
        if not joins and not steps and not decodes:
            return None
        return IterationPlan(joins, steps, decodes, encodes, evictions, returns)

    def commit(
        self, plan: IterationPlan, result: IterationResult, now: float, seconds: float = 0.0
    ) -> list[SchedulerEvent]:
        """Apply the result of an executed plan, which took `seconds`. Requests cancelled meanwhile are skipped."""
        self._table.bump_version()
        if result.oom_phase is None and not result.failed:
            self._update_costs(plan, result, now, seconds)
            self._predictor.renew_costs()
        events: list[SchedulerEvent] = []
        for image, reason in result.failed.items():
            events += self._finish(image.attempt_id, FinishReason.FAILED, reason, now)
        for assignment in plan.encodes if result.oom_phase not in ("evictions", "encodes") else ():
            if assignment.image.attempt_id in self._table.requests:
                self._table.mark_encoded(assignment.image.attempt_id)
        events += self._handle_oom(plan, result, now)
        for assignment in plan.joins:
            if assignment.image in self._table.running and assignment not in plan.returns:
                self._table.running[assignment.image].join_timings = result.phase_timings or NO_TIMINGS
        stepped = [step for step in plan.steps if step.image in self._table.running]
        if stepped and result.oom_phase in (None, "decodes"):
            self._table.record_steps([step.image for step in stepped], len(plan.steps))
        for assignment in plan.decodes if result.oom_phase is None else ():
            if assignment.image in self._table.running:
                events += self._complete_image(assignment.image, result, now)
        return events

    def forget_model(self, model: ModelKey) -> None:
        """Drop what was learned of a model, of which no request runs or waits."""
        self.costs.forget(model)
        for limits in (self._decode_limits, self._encode_limits):
            for batch_key in [key for key in limits if key.model == model]:
                del limits[batch_key]
        self._predictor.forget_model(model)

    # Planning.

    def _join(self, now: float) -> _Joins:
        """Give images slots, if necessary those of others."""
        table, num_free = self._table, max(self._predictor.max_running - len(self._table.running), 0)
        may_evict = bool(table.queue) and self._evictions.may_evict()
        if not table.queue or not (num_free or may_evict):
            return _Joins()
        in_order = itertools.islice(self._predictor.queue(now), _MAX_CANDIDATES)
        evictable = self._evictions.find(now) if may_evict and num_free < table.num_waiting else []
        if not num_free and not evictable:
            return _Joins()
        joining, encodes = select_joins(in_order, table, num_free + len(evictable), self._max_encodes)
        evicted = self._evictions.select(joining[num_free:], evictable, now)
        joining = joining[: num_free + len(evicted)]
        returning = [image for image in joining if image in table.evicted]
        self._evictions.on_join(joining)
        evictions = tuple([table.evict(image) for image in evicted])
        for image in joining:
            table.assign(image, now)
        joins, encoded, returns = (
            tuple([SlotAssignment(image, table.running[image].slot) for image in images])
            for images in (joining, [image for image in encodes if image in joining], returning)
        )
        return _Joins(evictions, joins, encoded, returns)

    def _max_encodes(self, batch_key: BatchKey) -> int:
        return self._encode_limits.get(batch_key, self.decode_batch)

    def _next_decodes(self, steps: Iterable[Step]) -> tuple[SlotAssignment, ...]:
        running = self._table.running
        last_steps = [step.image for step in steps if step.call + 1 == running[step.image].active.request.num_calls]
        ready = [image for image, running_image in running.items() if running_image.is_denoised] + last_steps
        if not ready:
            return ()
        batch_key = running[ready[0]].request.last_key.decode_key
        same_key = [image for image in ready if running[image].request.last_key.decode_key == batch_key]
        limit = self._decode_limits.get(batch_key, self.decode_batch)
        return tuple(SlotAssignment(image, running[image].slot) for image in same_key[:limit])

    # Committing.

    def _update_costs(self, plan: IterationPlan, result: IterationResult, now: float, seconds: float) -> None:
        """Update the cost model from a timed iteration; one in which a request was cancelled is ignored.

        If only the whole iteration was timed, the costs of decoding and encoding stay as measured at the start.
        """
        images = [entry.image for phase in (plan.joins, plan.steps, plan.decodes) for entry in phase]
        if seconds <= 0.0 or not result.is_timed or any(image not in self._table.running for image in images):
            return
        phase_timings = result.phase_timings
        if phase_timings is not None and not phase_timings.is_known:
            phase_timings = None
        if phase_timings is not None and plan.encodes and phase_timings.seconds("encodes"):
            encoded = self._table.request_of(plan.encodes[0].image).batch_key
            self.costs.observe_image_encode(encoded, len(plan.encodes), phase_timings.seconds("encodes"))
        models = {self._table.request_of(assignment.image).batch_key.model for assignment in plan.joins}
        if phase_timings is not None and len(models) == 1 and phase_timings.seconds("joins") and not plan.returns:
            self.costs.observe_text_encode(models.pop(), len(plan.joins), phase_timings.seconds("joins"))
        decoded = self._table.request_of(plan.decodes[0].image).last_key if plan.decodes else None
        if phase_timings is not None and decoded is not None and phase_timings.seconds("decodes"):
            self.costs.observe_decode(decoded, len(plan.decodes), phase_timings.seconds("decodes"))
        if plan.steps:
            stepped = [self._table.running[step.image] for step in plan.steps]
            batch_key, rows = cost_key(stepped), count_rows(stepped)
            if phase_timings is not None:
                step_s = phase_timings.seconds("steps")
            else:  # only the whole iteration was timed
                decode_s = self.costs.decode_s(decoded, len(plan.decodes)) if decoded is not None else 0.0
                step_s = max(seconds - decode_s - result.join_s, 0.1 * seconds)
            self.costs.observe_step(batch_key, rows, step_s)
            keys = {running.step_key for running in stepped}
            self._predictor.record_iteration(keys, batch_key, rows, seconds, now)

    def _handle_oom(self, plan: IterationPlan, result: IterationResult, now: float) -> list[RequestFinished]:
        """Shrink the batches of the phase that ran out of memory; fail an image that does not fit alone."""
        # A plan has a field for each phase.
        named: tuple[SlotAssignment | Step | ReleasedImage, ...] = getattr(plan, result.oom_phase or "", ())
        images = [each.image for each in named if each.image in self._table.running]
        num_others = len(self._table.running) - len(images)
        if result.oom_phase in ("evictions", "encodes"):  # so nothing has joined
            joining = [each.image for each in plan.joins if each.image in self._table.running]
            num_others = len(self._table.running) - len(joining)
            self._table.requeue(joining)
        if result.oom_phase == "evictions":
            for evicted in plan.evictions:
                if evicted.image in self._table.evicted:
                    self._table.undo_evict(evicted)
            self._evictions.on_out_of_memory(len(self._table.evicted))
        if not images:
            return []
        request = self._table.request_of(images[0])
        batch_key = request.last_key if result.oom_phase == "decodes" else request.batch_key
        if result.oom_phase == "steps":
            batch_key = cost_key([self._table.running[image] for image in images])
        if len(named) == 1 and (result.oom_phase not in ("encodes", "joins") or num_others == 0):
            message = f"{batch_key.width_px}x{batch_key.height_px} pixels do not fit the device's memory, even alone"
            self._predictor.max_running = self.num_slots  # the image that left no memory for others is gone
            return self._finish(images[0].attempt_id, FinishReason.FAILED, message, now)
        match result.oom_phase:
            case "encodes" if len(named) > 1:
                self._encode_limits[batch_key] = len(named) // 2
            case "encodes":
                self._predictor.max_running = num_others
            case "joins":
                self._predictor.max_running = max(num_others + len(named) // 2, 1)
                self._table.requeue(images)
            case "steps":
                # Images cancelled meanwhile count as many rows as the others do on average.
                rows = sum(self._table.request_of(image).rows for image in images) * len(named) // len(images)
                self.costs.record_oom(batch_key, rows)
            case _:  # "decodes"
                self._decode_limits[batch_key.decode_key] = len(named) // 2
        return []

    def _complete_image(self, image: ItemId, result: IterationResult, now: float) -> list[SchedulerEvent]:
        active, running = self._table.requests[image.attempt_id], self._table.complete(image)
        # A departure frees memory: try one more image, or all slots once the batch is empty.
        max_running = self._predictor.max_running + 1 if self._table.running else self.num_slots
        self._predictor.max_running = min(max_running, self.num_slots)
        self._table.max_evicted = self.num_slots
        active.timings = RequestTimings(
            queue_s=running.joined_at - active.arrived_at,
            slot_s=now - running.joined_at,
            join_timings=running.join_timings,
            decode_timings=result.phase_timings or NO_TIMINGS,
            mean_batch=running.batch_size_sum / running.request.num_calls,
            num_calls=running.request.num_calls,
        )
        events: list[SchedulerEvent] = [ImageFinished(image)]
        if active.undecoded:
            return events
        self._predictor.record_finished(active, now)
        return events + self._finish(image.attempt_id, FinishReason.FINISHED, "", now)

    def _finish(self, attempt_id: str, finish_reason: FinishReason, message: str, now: float) -> list[RequestFinished]:
        if attempt_id not in self._table.requests:
            return []
        unfinished = None if finish_reason is FinishReason.FINISHED else self._table.timings_so_far(attempt_id, now)
        active, num_departures = self._table.remove(attempt_id)
        timings = active.timings if unfinished is None else unfinished
        return [RequestFinished(attempt_id, finish_reason, message, timings, num_departures, finished_at=now)]
