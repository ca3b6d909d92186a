"""Predicts the order of images, the start and finish of each request, and the duration of the accepted work.

Reads the request table and the cost model, and changes neither, except that `decay` decays the cost model's slowdown.
Learns two things of its own: the *expected batch size*, the average rows of an iteration, and the *corrections* of what
is predicted for each client (`corrections.py`).
"""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import NamedTuple

from noria.protocol.model_spec import ModelKey
from noria.scheduling.corrections import Corrections
from noria.scheduling.costs import CostModel
from noria.scheduling.policies import Candidate, Policy, shares_fairly, uses_deadlines
from noria.scheduling.step.active_request import ActiveRequest, Rank
from noria.scheduling.step.device_time import DeviceTime
from noria.scheduling.step.forecast import Forecast, HeadForecast, SimulatedImage, forecast, forecast_head
from noria.scheduling.step.head import choose_head
from noria.scheduling.step.prediction import NOTHING_BEHIND, Prediction, by_request
from noria.scheduling.step.request_table import RequestTable, RunningImage
from noria.scheduling.step.shared_calls import mix_sizes
from noria.scheduling.step.waiting_queue import WaitingImage, WaitingQueue
from noria.scheduling.types import BatchKey, ItemId, SchedulableRequest

_BATCH_SIZE_ITERATIONS = 30.0  # over which the expected batch size is averaged
HEAD_IMAGES = 32  # waiting images that a forecast simulates; `micro/scheduling.py` measures the error for those behind
_REFRESHED = 4  # images; a key takes a microsecond
_MAX_PASSES = 4  # over the head of the queue; each brings other images there


class _ImageCosts(NamedTuple):
    """Costs of one image, in seconds."""

    expected_call_s: float  # duration of a call, at the expected batch size
    min_call_s: float  # duration of a call, alone
    decode_s: float


OrderKey = tuple[float, float]
"""The policy's key and the virtual finish."""

CostsCache = dict[tuple[BatchKey, int], _ImageCosts]
"""Costs by batch key and rows of an image, valid until the next iteration."""


@dataclass(slots=True)
class CompletionPredictor:
    """Predictions for the requests in `table`. The scheduler lowers `max_running` after joins ran out of memory."""

    table: RequestTable
    costs: CostModel
    policy: Policy
    max_running: int
    decode_batch: int
    head_images: int = HEAD_IMAGES  # waiting images that are simulated
    width_slack: float = math.inf  # as `BatchLimits` has it
    _expected_batch_size: dict[BatchKey, float] = field(init=False, default_factory=dict)
    # The largest size in the last call of each key, to which its rows were padded.
    _call_keys: dict[BatchKey, BatchKey] = field(init=False, default_factory=dict)
    _last_iteration: tuple[float, float] = field(init=False, default=(0.0, 0.0))  # its end and its duration
    _corrections: Corrections = field(init=False, default_factory=Corrections)
    _costs_cache: CostsCache = field(init=False, default_factory=dict)
    _cached: Prediction = field(init=False, default=Prediction(-1, {}, {}, NOTHING_BEHIND, 0.0, 0.0, 0.0, 1))

    # Order.

    def policy_keys(self, images: Iterable[RunningImage], now: float) -> dict[ItemId, OrderKey]:
        """Return the policy's keys of running images."""
        return {
            running.image: (
                self.policy_key(running.active, running.call, now, running.image.index),
                running.active.turn(running.image.index).virtual_finish,
            )
            for running in images
        }

    def policy_key(self, active: ActiveRequest, call: int, now: float, index: int) -> float:
        """Sort key of an image of a request whose next call is `call`."""
        request = active.request
        expected_s = min_s = decode_s = 0.0
        for batch_key, calls in request.calls_by_key(call):
            cost_key = batch_key, request.rows
            found = self._costs_cache.get(cost_key)
            if found is None:
                found = self._costs_cache[cost_key] = self._image_costs(*cost_key)
            expected_call_s, min_call_s, decode_s = found
            expected_s, min_s = expected_s + calls * expected_call_s, min_s + calls * min_call_s
        candidate = Candidate(
            active.arrived_at - request.waited_s,
            request.deadline,
            request.priority,
            expected_s + decode_s,
            min_s + decode_s,
            active.turn(index).deadline,
        )
        return self.policy(candidate, now) + active.priority_penalty

    def take_turns(self, active: ActiveRequest) -> None:
        """Give the images of a new request their turns, if clients share the device fairly."""
        if not shares_fairly(self.policy):
            return
        request, shares = active.request, self.table.shares
        num_images, device_time = shares.num_images(request.client) + len(active.undecoded), self._device_time()
        alone_s = {
            index: device_time.of_image(request, request.progress_of(index).call, num_images)
            for index in active.undecoded
        }
        active.turns = shares.enter(request, alone_s, active.arrived_at)

    def renew_costs(self) -> None:
        """Compute the costs of images anew; call it before each plan and submission, and when costs have changed."""
        self._costs_cache = {}

    def _image_costs(self, batch_key: BatchKey, rows: int) -> _ImageCosts:
        call_key, min_call_s = self._call_keys.get(batch_key, batch_key), self.costs.step_s(batch_key, rows)
        expected_rows = min(round(self._expected_batch_size.get(call_key, 0.0)), self.costs.rows_limit(call_key))
        expected_call_s = self.costs.step_s(call_key, expected_rows) if expected_rows >= rows else min_call_s
        return _ImageCosts(expected_call_s, min(min_call_s, expected_call_s), self.costs.decode_s(batch_key))

    def queue(self, now: float) -> WaitingQueue:
        """Return the queue with all of its images in the policy's order.

        A key can change while its image waits: its deadline becomes infeasible, or costs change. So each call updates
        the keys of `_REFRESHED` images at the head and of as many others in turn. The order is exact while no more
        than these wait.
        """
        queue = self.table.queue
        while queue.unranked:
            _, active = queue.unranked.popitem()
            active.image_work_s = self._image_work_s(active.request)
            keys = [(index, self.waiting_key(active, index, now)) for index in active.waiting]
            queue.insert(active, keys)
            self._invalidate(active.first_rank)
        for _ in range(_MAX_PASSES):
            head = list(itertools.islice(queue, _REFRESHED))
            if not sum([self._refresh(image, now) for image in head]):
                break
        for image in queue.next_to_refresh(_REFRESHED):
            self._refresh(image, now)
        return queue

    def _refresh(self, waiting: WaitingImage, now: float) -> bool:
        """Update the key of a waiting image; return whether it has changed."""
        active, index, before = waiting.active, waiting.image.index, waiting.rank
        key = self.waiting_key(active, index, now)
        if key == before[0]:
            return False
        self.table.queue.remove_image(active, index)
        active.image_work_s = self._image_work_s(active.request)
        self.table.queue.insert(active, [(index, key)])
        self._invalidate(min(before, active.ranks[index]))
        return True

    def waiting_key(self, active: ActiveRequest, index: int, now: float) -> float:
        """Sort key of a waiting image of a request."""
        return self.policy_key(active, self.table.waiting_call(active, index), now, index)

    def _invalidate(self, rank: Rank) -> None:
        """Drop the prediction if its head has changed at `rank`."""
        if rank < self._cached.end:
            self._cached = replace(self._cached, version=-1)

    def rank_again(self, active: ActiveRequest) -> None:
        """Sort a waiting request again whose penalty has changed."""
        self.table.queue.remove(active)
        self.table.queue.add(active)
        self._cached = replace(self._cached, version=-1)

    # Forecasts.

    def predict_requests(self, attempt_ids: Iterable[str], now: float) -> dict[str, Forecast]:
        """First start and last finish of each request, in seconds from now, with the learned correction."""
        prediction = self._predict(now)
        wanted = [self.table.requests[attempt_id] for attempt_id in attempt_ids]
        return {
            active.request.attempt_id: self._corrected(self._forecast_request(active, prediction), active)
            for active in wanted
        }

    def predict_running(self, now: float) -> dict[ItemId, Forecast]:
        """Finish of each running image, with the learned correction."""
        images = self._predict(now).images
        return {image: self._corrected(images[image], each.active) for image, each in self.table.running.items()}

    def predict_first_waiting(self, active: ActiveRequest, now: float) -> Forecast:
        """Start and finish of the first waiting image of a request, with the learned correction."""
        prediction = self._predict(now)
        image = ItemId(active.request.attempt_id, active.waiting[0])
        if image in prediction.images:
            return self._corrected(prediction.images[image], active)
        work_s = self.table.queue.ahead_of(active.ranks[image.index]).work_s
        return self._corrected(prediction.behind(work_s, active.image_work_s), active)

    def _corrected(self, each: Forecast, active: ActiveRequest) -> Forecast:
        factor = self._corrections.of(active.request.client)
        return Forecast(factor * each.start_in_s, factor * each.finish_in_s)

    def predict_uncorrected(self, attempt_id: str, now: float) -> Forecast:
        """First start and last finish of a request by the cost model alone, without the learned correction."""
        return self._forecast_request(self.table.requests[attempt_id], self._predict(now))

    def predict_late(self, newcomer: ActiveRequest, now: float) -> dict[str, Forecast]:
        """Forecasts of the other requests that miss their deadlines and can be delayed by `newcomer`."""
        prediction, late = self._predict(now), dict[str, Forecast]()

        def check(active: ActiveRequest) -> None:
            if active.request.deadline is None or active is newcomer:
                return
            forecasted = self._forecast_request(active, prediction)
            if forecasted.finish_in_s > active.request.deadline - now:
                late[active.request.attempt_id] = forecasted

        for attempt_id in prediction.requests:
            check(self.table.requests[attempt_id])
        first = max(prediction.end, newcomer.first_rank)
        for block, work_s in self.table.queue.blocks_from(first) if first != NOTHING_BEHIND else ():
            _, finish_in_s = prediction.behind(work_s + block.work_s, block.max_work_s)
            if block.min_deadline - now < finish_in_s:
                for each in block.images:
                    if each.rank >= first:
                        check(each.active)
        return late

    def predict_without(self, active: ActiveRequest, attempt_ids: Iterable[str], now: float) -> dict[str, Forecast]:
        """Predict as `predict_uncorrected`, if `active`, the last request added to the table, were not in it."""
        cached, first_rank = self._predict(now), active.first_rank
        self.table.remove(active.request.attempt_id)
        if first_rank >= cached.end:
            self._cached = replace(cached, version=self.table.version)
        forecasts = {attempt_id: self.predict_uncorrected(attempt_id, now) for attempt_id in attempt_ids}
        self.table.restore(active)
        self.queue(now)
        self._cached = replace(cached, version=self.table.version)
        return forecasts

    def to_simulated(self, image: ItemId, now: float) -> SimulatedImage:
        """Convert `image` to the input of a forecast."""
        active, running = self.table.requests[image.attempt_id], self.table.running.get(image)
        request = active.request
        deadline_s = request.deadline - now if request.deadline is not None and uses_deadlines(self.policy) else None
        call = self.table.waiting_call(active, image.index) if running is None else running.call
        (batch_key, _), *later = request.stages_from(call)
        return SimulatedImage(
            image,
            batch_key,
            request.rows,
            request.num_calls - call,
            running is not None,
            request.exclusive,
            deadline_s,
            needs_encode=active.needs_encode and running is None and image.index == active.waiting[0],  # it joins first
            call_work_s=active.image_work_s / request.num_calls,
            later_stages=tuple(later),
            client=request.client,
            weight=request.weight,
            is_evictable=running is not None and not running.is_denoised,
            is_begun=running is not None or image in self.table.evicted,
        )

    def _predict(self, now: float) -> Prediction:
        """Forecast the running images and the head of the queue.

        The result stays valid while only time passes: work starts only when the engine loop runs.
        """
        queue = self.queue(now)
        if self._cached.version == self.table.version:
            return self._cached
        self._cached = self._forecast_head(queue, now)
        return self._cached

    def _forecast_head(self, queue: WaitingQueue, now: float) -> Prediction:
        running, max_running = self.table.running, self.max_running
        ranked = [(key, image) for image, key in self.policy_keys(running.values(), now).items()]
        num_wanted, head_work_s, end = self.head_images + max(max_running - len(running), 0), 0.0, NOTHING_BEHIND
        for waiting in queue:
            if num_wanted <= 0:
                end = waiting.rank
                break
            num_wanted -= 1
            head_work_s += waiting.work_s
            ranked.append((waiting.rank[:2], waiting.image))
        in_order = [image for _, image in sorted(ranked, key=itemgetter(0))]
        head = choose_head(in_order, self.table, self.costs, max_running, self.head_images)
        simulated, max_running = [self.to_simulated(image, now) for image in head.images], head.num_slots
        for each in simulated[max_running:] if head.behind else ():
            each.running = each.running and each.calls_left <= 0
        requests = {each.batch_key: self.table.request_of(each.image) for each in simulated}
        mix_sizes(simulated, requests, max_running, self.costs)
        num_evictable = self.table.num_evictable if self.max_running == self.table.num_slots else -math.inf
        limits = self.costs, self._expected_batch_size, self.decode_batch, self.width_slack, num_evictable
        if head.behind or end != NOTHING_BEHIND:
            forecasts = head.extrapolate(forecast_head(simulated, max_running, *limits))
        else:
            forecasts = HeadForecast(forecast(simulated, max_running, *limits), 0.0, 0.0)
        return Prediction(
            self.table.version,
            forecasts.images,
            by_request(forecasts.images),
            end,
            forecasts.end_in_s,
            forecasts.pace,
            head_work_s,
            max_running,
        )

    def _forecast_request(self, active: ActiveRequest, prediction: Prediction) -> Forecast:
        in_head = prediction.requests.get(active.request.attempt_id)
        if not active.waiting or active.last_rank < prediction.end:
            assert in_head is not None, active
            return in_head
        work_s = self.table.queue.ahead_of(active.last_rank).work_s
        start_in_s, finish_in_s = prediction.behind(work_s, active.image_work_s)
        if in_head is not None:  # some of its images run, or are in the head
            return Forecast(in_head.start_in_s, max(in_head.finish_in_s, finish_in_s))
        if len(active.waiting) > 1:
            work_s = self.table.queue.ahead_of(active.first_rank).work_s
            start_in_s, _ = prediction.behind(work_s, active.image_work_s)
        return Forecast(start_in_s, finish_in_s)

    # Durations.

    def unloaded_s(self, request: SchedulableRequest) -> float:
        """Duration of a request on an idle server, without the learned correction."""
        (batch_key, _), *later = request.stages_from(0)
        images = [
            SimulatedImage(
                ItemId(request.attempt_id, index),
                batch_key,
                request.rows,
                request.num_calls,
                needs_encode=request.has_start_image and index == 0,
                later_stages=tuple(later),
            )
            for index in range(request.num_images)
        ]
        done = forecast(images, self.max_running, self.costs, {}, self.decode_batch)
        return max(each.finish_in_s for each in done.values())

    @property
    def backlog_s(self) -> float:
        """Duration of all accepted work if no further request arrives."""
        return self._device_time().of_table(self.table)

    def backlog_of(self, client: str) -> float:
        """The part of `backlog_s` of a client, in seconds."""
        return self._device_time().of_table(self.table, client)

    def device_time_s(self, request: SchedulableRequest) -> float:
        """Device time that a new request takes in full batches."""
        return self._device_time().of_request(request)

    def _image_work_s(self, request: SchedulableRequest) -> float:
        return self._device_time().of_image(request) / self.costs.slowdown

    def _device_time(self) -> DeviceTime:
        return DeviceTime(self.costs, self.max_running, self.decode_batch)

    # Learning.

    def record_iteration(
        self, stepped_keys: Iterable[BatchKey], call_key: BatchKey, rows: int, seconds: float, now: float
    ) -> None:
        """Record an iteration that ended `now`: a call of `rows` rows as large as `call_key`, of all `stepped_keys`.

        The expected batch size of keys without running images decays.
        """
        self._last_iteration = now, seconds
        stepped = set(stepped_keys)
        self._call_keys |= dict.fromkeys(stepped, call_key)
        active_keys = {running.step_key for running in self.table.running.values()} - stepped
        for other, expected_rows in self._expected_batch_size.items():
            self._expected_batch_size[other] = (
                expected_rows if other in active_keys else (1 - 1 / _BATCH_SIZE_ITERATIONS) * expected_rows
            )
        for batch_key in stepped:
            self._expected_batch_size[batch_key] = (
                self._expected_batch_size.get(batch_key, 0.0) + rows / _BATCH_SIZE_ITERATIONS
            )

    def decay(self, now: float) -> None:
        """Decay the slowdown and the expected batch sizes for the idle time since the last iteration or `decay`."""
        ended, seconds = self._last_iteration
        self.costs.decay_slowdown(now - ended if seconds > 0.0 else 0.0)
        decay_factor = math.exp(-max(now - ended, 0.0) / (_BATCH_SIZE_ITERATIONS * seconds)) if seconds > 0.0 else 1.0
        self._expected_batch_size = {key: rows * decay_factor for key, rows in self._expected_batch_size.items()}
        self._last_iteration = now, seconds

    def forget_model(self, model: ModelKey) -> None:
        """Drop the expected batch sizes of a model without requests."""
        for values in (self._expected_batch_size, self._call_keys):
            for batch_key in [batch_key for batch_key in values if batch_key.model == model]:
                del values[batch_key]

    def record_finished(self, active: ActiveRequest, now: float) -> None:
        """Learn the correction from a finished request; one without a forecast is ignored."""
        self._corrections.learn(active.request.client, now - active.arrived_at, active.promised_forecast.finish_in_s)
