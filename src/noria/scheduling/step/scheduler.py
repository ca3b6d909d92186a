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

from noria.scheduling.costs import CostModel
from noria.scheduling.policies import Policy, least_slack
from noria.scheduling.step.admission import CompletionPredictor
from noria.scheduling.step.batch_selection import BatchLimits, select_batch
from noria.scheduling.step.request_table import RequestTable
from noria.scheduling.step.stride import StrideScheduler
from noria.scheduling.types import (
    NO_TIMINGS,
    BatchKey,
    FinishReason,
    ImageDecoded,
    ImageId,
    IterationPlan,
    IterationResult,
    Phase,
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


@dataclass(slots=True)
class StepScheduler:
    """Decides; does nothing. `plan` and `commit` alternate; `submit`, `cancel` and `expire` may come between any two calls."""

    num_slots: int
    decode_batch: int = 4
    queue_limit: int = 256  # images that may wait beyond the free slots
    queue_limit_s: float = math.inf  # seconds of work that may be ahead of whoever has to wait
    policy: Policy = least_slack
    costs: CostModel = field(default_factory=CostModel)
    _table: RequestTable = field(init=False)
    _predictor: CompletionPredictor = field(init=False)
    _stride: StrideScheduler = field(init=False, default_factory=StrideScheduler)
    _decode_limits: dict[BatchKey, int] = field(init=False, default_factory=dict)  # where fewer fit the memory

    def __post_init__(self) -> None:
        self._table = RequestTable(self.num_slots)
        self._predictor = CompletionPredictor(self._table, self.costs, self.policy, self.num_slots, self.decode_batch)

    @property
    def num_waiting(self) -> int:
        """Images without a slot."""
        return len(self._table.waiting)

    @property
    def num_running(self) -> int:
        """Images with a slot."""
        return len(self._table.running)

    def oldest_age_s(self, now: float) -> float:
        """How long ago the oldest request of those with an image that waits for a slot came; 0 without any."""
        arrivals = {
            image.request_id: self._table.requests[image.request_id].arrived_at for image in self._table.waiting
        }
        return max(0.0, now - min(arrivals.values(), default=now))

    @property
    def backlog_s(self) -> float:
        """About how long everything that was accepted will take, if nobody else comes."""
        return self._predictor.backlog_s

    def submit(self, request: SchedulableRequest, now: float, arrived_at: float | None = None) -> list[SchedulerEvent]:
        """Take a request in, or refuse it at once. Its waiting counts from when it `arrived`; left out, from now."""
        assert request.request_id not in self._table.requests, request.request_id
        if not self._table.requests:
            self._predictor.decay(now)
        arrived_at = now if arrived_at is None else arrived_at
        refusal = self._refuse_for_queue_length(request) or self._predictor.refuse_for_backlog(
            request, self.queue_limit_s
        )
        if refusal is not None:
            return [replace(refusal, finished_at=now, timings=RequestTimings(queue_s=now - arrived_at))]
        active = self._table.add(request, arrived_at)
        late_ids = self._predictor.deadlines_broken_by(active, now)
        if (refusal := self._predictor.refuse_for_deadline(request, late_ids, now)) is not None:
            self._table.remove(request.request_id)
            return [replace(refusal, finished_at=now, timings=RequestTimings(queue_s=now - arrived_at))]
        if late_ids:
            self._predictor.deprioritize(active, late_ids, now)  # it may wait; they may not
        active.promised_forecast = self._predictor.predict_uncorrected(now)[request.request_id]
        return []

    def cancel(self, request_id: str, now: float) -> list[SchedulerEvent]:
        """End a request; one that is unknown, or has ended, is nobody's loss."""
        return self._finish(request_id, FinishReason.CANCELLED, "cancelled by the caller", now)

    def expire(self, now: float) -> list[SchedulerEvent]:
        """End every request whose deadline has passed."""
        expired = {
            name: active.request.expires_at - active.arrived_at
            for name, active in self._table.requests.items()
            if active.request.expires_at is not None and active.request.expires_at <= now
        }
        message = "it was not done within {:.2f} s: allow more time, or ask for fewer steps"
        return [
            event
            for name, allowed_s in expired.items()
            for event in self._finish(name, FinishReason.EXPIRED, message.format(allowed_s), now)
        ]

    def next_expiry(self) -> float | None:
        """When `expire` will next have something to do, if nothing else happens."""
        expiries = [active.request.expires_at for active in self._table.requests.values()]
        return min((expires_at for expires_at in expiries if expires_at is not None), default=None)

    def progress(self, request_ids: Iterable[str], now: float) -> dict[str, RequestProgress]:
        """How far these requests are, and when they will start and be done; those that have ended are left out."""
        known = [request_id for request_id in request_ids if request_id in self._table.requests]
        if not known:
            return {}
        positions, forecasts = self._predictor.queue_positions(now), self._predictor.predict_requests(now)
        found = {}
        for request_id in known:
            images = self._table.requests[request_id].images
            position = max((positions[image] for image in images if image in positions), default=None)
            call = min(self._table.next_call(image) for image in images)
            prediction = forecasts[request_id]
            found[request_id] = RequestProgress(position, call, prediction.start_in_s, prediction.finish_in_s)
        return found

    def snapshot(self, now: float, max_waiting: int) -> SchedulerSnapshot:
        """Everybody's place, and what is foreseen for him; of the requests that wait the first `most_waiting` to board."""
        forecasts, num_images, first = self._predictor.predict_images(now), Counter[str](), dict[str, ImageId]()
        for image in self._predictor.queue_positions(now):
            num_images[image.request_id] += 1
            first.setdefault(image.request_id, image)
        running = [
            RunningImageSnapshot(
                image, each.request, each.slot, each.call, each.joined_at, forecasts[image].finish_in_s
            )
            for image, each in self._table.running.items()
        ]
        waiting = []
        for request_id, image in itertools.islice(first.items(), max_waiting):
            active = self._table.requests[request_id]
            waiting.append(
                WaitingRequestSnapshot(
                    active.request, num_images[request_id], active.arrived_at, forecasts[image].start_in_s
                )
            )
        return SchedulerSnapshot(tuple(sorted(running, key=lambda each: each.slot)), tuple(waiting))

    def plan(self, now: float) -> IterationPlan | None:
        """The next turn, or None when there is nothing to do."""
        joins = self._join(now)
        steps = self._next_steps(now)
        decodes = self._next_decodes(steps)
        return IterationPlan(joins, steps, decodes) if joins or steps or decodes else None

    def commit(
        self, plan: IterationPlan, result: IterationResult, now: float, seconds: float = 0.0
    ) -> list[SchedulerEvent]:
        """Take note of a turn that was carried out, and took `seconds`. What was cancelled meanwhile is passed over."""
        self._table.bump_version()
        if result.oom_phase is None and not result.failed:
            self._update_costs(plan, result, now, seconds)
        events: list[SchedulerEvent] = []
        for image, reason in result.failed.items():
            if image in self._table.running:
                events += self._finish(image.request_id, FinishReason.FAILED, reason, now)
        events += self._handle_oom(plan, result, now)
        for assignment in plan.joins:
            if assignment.image in self._table.running:
                self._table.running[assignment.image].join_timings = result.phase_timings or NO_TIMINGS
        for step in plan.steps if result.oom_phase not in ("boards", "steps") else ():
            if step.image in self._table.running:
                self._table.record_step(step.image, step.call + 1, len(plan.steps))
        for assignment in plan.decodes if result.oom_phase is None else ():
            if assignment.image in self._table.running:
                events += self._complete_image(assignment.image, result, now)
        return events

    # Deciding.

    def _join(self, now: float) -> tuple[SlotAssignment, ...]:
        num_free = self._predictor.max_running - len(self._table.running)
        in_flight = {image.request_id for image in self._table.running}
        exclusive = any(self._table.requests[request_id].request.exclusive for request_id in in_flight)
        joining: list[ImageId] = []
        for image in self._predictor.sort_by_policy(self._table.waiting, now)[:num_free] if num_free > 0 else ():
            exclusive = exclusive or self._table.request_of(image).exclusive
            if exclusive and in_flight - {image.request_id}:
                break  # whoever flies alone holds the others back until the wheel is empty
            joining.append(image)
            in_flight.add(image.request_id)
        for image in joining:
            self._table.assign(image, now)
        return tuple(SlotAssignment(image, self._table.running[image].slot) for image in joining)

    def _next_steps(self, now: float) -> tuple[Step, ...]:
        by_key: dict[BatchKey, list[ImageId]] = {}
        for image, running_image in self._table.running.items():
            if not running_image.is_denoised:
                by_key.setdefault(running_image.request.batch_key, []).append(image)
        if not by_key:
            return ()
        num_running = {batch_key: len(images) for batch_key, images in by_key.items()}
        batch_key = next(iter(by_key))
        if len(by_key) > 1:
            running = [image for images in by_key.values() for image in images]
            batch_key = self._table.request_of(self._predictor.sort_by_policy(running, now)[0]).batch_key
        batch_key = self._stride.next(num_running, batch_key)
        chosen = self._select_batch(by_key[batch_key], batch_key, now)
        cost_s = self.costs.step_s(batch_key, self._count_rows(chosen)) or 1.0  # nothing known yet: a call is a call
        self._stride.charge(batch_key, cost_s, num_running[batch_key])
        running_images = self._table.running
        return tuple(Step(image, running_images[image].slot, running_images[image].call) for image in chosen)

    def _select_batch(self, images: list[ImageId], batch_key: BatchKey, now: float) -> list[ImageId]:
        running = self._table.running.values()
        limits = BatchLimits(
            rows_limit=self.costs.exploration_limit(batch_key),
            step_s=lambda rows: self.costs.step_s(batch_key, rows),
            decode_s=self.costs.decode_s(batch_key),
            share=len(images) / sum(not each.is_denoised for each in running),
            is_full=len(running) >= self._predictor.max_running,
        )
        in_order = [self._predictor.to_simulated(image, now) for image in self._predictor.sort_by_policy(images, now)]
        chosen = {each.image for each in select_batch(in_order, limits, now=0.0)[0]}
        return [image for image in images if image in chosen]

    def _count_rows(self, images: Iterable[ImageId]) -> int:
        return sum(self._table.request_of(image).rows for image in images)

    def _next_decodes(self, steps: Iterable[Step]) -> tuple[SlotAssignment, ...]:
        running = self._table.running
        last_steps = [step.image for step in steps if step.call + 1 == running[step.image].request.num_calls]
        ready = [image for image, running_image in running.items() if running_image.is_denoised] + last_steps
        if not ready:
            return ()
        batch_key = running[ready[0]].request.batch_key
        same_key = [image for image in ready if running[image].request.batch_key == batch_key]
        limit = self._decode_limits.get(batch_key, self.decode_batch)
        return tuple(SlotAssignment(image, running[image].slot) for image in same_key[:limit])

    # What a turn taught, and how requests end.

    def _update_costs(self, plan: IterationPlan, result: IterationResult, now: float, seconds: float) -> None:
        """Feed the cost model; whoever was cancelled during the turn is not here any more, and such a turn teaches nothing.

        Where only the turn could be timed, decoding and encoding stay as they were measured at the start.
        """
        images = [entry.image for phase in (plan.joins, plan.steps, plan.decodes) for entry in phase]
        if seconds <= 0.0 or not result.is_timed or any(image not in self._table.running for image in images):
            return
        phase_timings = (
            result.phase_timings if result.phase_timings is not None and result.phase_timings.is_known else None
        )
        models = {self._table.request_of(assignment.image).batch_key.model for assignment in plan.joins}
        if phase_timings is not None and len(models) == 1 and phase_timings.text_encode_s:
            self.costs.observe_text_encode(models.pop(), len(plan.joins), phase_timings.text_encode_s)
        decoded = self._table.request_of(plan.decodes[0].image).batch_key if plan.decodes else None
        if phase_timings is not None and decoded is not None and phase_timings.decode_s:
            self.costs.observe_decode(decoded, len(plan.decodes), phase_timings.decode_s)
        if plan.steps:
            batch_key, rows = (
                self._table.request_of(plan.steps[0].image).batch_key,
                self._count_rows(step.image for step in plan.steps),
            )
            if phase_timings is not None:
                step_s = phase_timings.step_s
            else:  # only the turn was timed
                decode_s = self.costs.decode_s(decoded, len(plan.decodes)) if decoded is not None else 0.0
                step_s = max(seconds - decode_s - result.join_s, 0.1 * seconds)
            self.costs.observe_step(batch_key, rows, step_s)
            self._predictor.record_iteration(batch_key, rows, seconds, now)

    def _handle_oom(self, plan: IterationPlan, result: IterationResult, now: float) -> list[SchedulerEvent]:
        """Make room in the memory: smaller batches from now on; only an image that does not fit alone fails."""
        phases: dict[Phase, tuple[SlotAssignment | Step, ...]] = {
            "boards": plan.joins,
            "steps": plan.steps,
            "decodes": plan.decodes,
        }
        named = phases[result.oom_phase] if result.oom_phase is not None else ()
        images = [each.image for each in named if each.image in self._table.running]
        if not images:
            return []
        batch_key, num_others = self._table.request_of(images[0]).batch_key, len(self._table.running) - len(images)
        if len(named) == 1 and (result.oom_phase != "boards" or num_others == 0):
            message = f"{batch_key.width_px}x{batch_key.height_px} does not fit the memory of the device, even alone"
            self._predictor.max_running = self.num_slots  # what made the others few is gone
            return self._finish(images[0].request_id, FinishReason.FAILED, message, now)
        match result.oom_phase:
            case "boards":
                self._predictor.max_running = max(num_others + len(named) // 2, 1)
                self._table.requeue(images)
            case "steps":
                # Whoever was cancelled meanwhile counts as the others do.
                rows = self._count_rows(images) * len(named) // len(images)
                self.costs.record_oom(batch_key, rows)
            case _:  # "decodes"
                self._decode_limits[batch_key] = len(named) // 2
        return []

    def _complete_image(self, image: ImageId, result: IterationResult, now: float) -> list[SchedulerEvent]:
        active, running = self._table.requests[image.request_id], self._table.complete(image)
        # Who leaves leaves room: a memory that was full once is tried again, and an empty one is as large as ever.
        max_running = self._predictor.max_running + 1 if self._table.running else self.num_slots
        self._predictor.max_running = min(max_running, self.num_slots)
        active.timings = RequestTimings(
            queue_s=running.joined_at - active.arrived_at,
            slot_s=now - running.joined_at,
            join_timings=running.join_timings,
            decode_timings=result.phase_timings or NO_TIMINGS,
            mean_batch=running.batch_size_sum / running.request.num_calls,
            num_calls=running.request.num_calls,
        )
        events: list[SchedulerEvent] = [ImageDecoded(image)]
        if active.undecoded:
            return events
        self._predictor.record_finished(active, now)
        return events + self._finish(image.request_id, FinishReason.FINISHED, "", now)

    def _finish(self, request_id: str, finish_reason: FinishReason, message: str, now: float) -> list[SchedulerEvent]:
        if request_id not in self._table.requests:
            return []
        unfinished = None if finish_reason is FinishReason.FINISHED else self._table.timings_so_far(request_id, now)
        active, num_departures = self._table.remove(request_id)
        timings = active.timings if unfinished is None else unfinished
        return [RequestFinished(request_id, finish_reason, message, timings, num_departures, finished_at=now)]

    def _refuse_for_queue_length(self, request: SchedulableRequest) -> RequestFinished | None:
        num_waiting, num_running = len(self._table.waiting), len(self._table.running)
        num_excess = (
            request.num_images + num_waiting - self.queue_limit - max(self._predictor.max_running - num_running, 0)
        )
        if num_excess <= 0:
            return None
        message = (
            f"the queue is full: {num_waiting} images wait, {self.queue_limit} may; {request.num_images} more asked for"
        )
        wait_s = self.backlog_s * min(num_excess / max(num_waiting + num_running, 1), 1.0)  # until so many have left
        return RequestFinished(request.request_id, FinishReason.REFUSED, message, retry_after_s=wait_s)
