"""Predicts the order of images, the start and finish of each request, and the duration of the accepted work.

Reads the request table and the cost model, and changes neither, except that `decay` decays the cost model's slowdown.
Learns two values of its own: the *expected batch size*, the average rows of an iteration, and the *correction*, the
ratio of actual to predicted durations of finished requests.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from noria.protocol.model_spec import ModelKey
from noria.scheduling.costs import CostModel
from noria.scheduling.policies import Candidate, Policy, uses_deadlines
from noria.scheduling.step.forecast import Forecast, SimulatedImage, forecast
from noria.scheduling.step.request_table import ActiveRequest, RequestTable
from noria.scheduling.step.shared_calls import share_calls
from noria.scheduling.types import BatchKey, ItemId, SchedulableRequest

_BATCH_SIZE_ITERATIONS = 30.0  # over which the expected batch size is averaged
_CORRECTION_WEIGHT = 0.05  # of one finished request


class _ImageCosts(NamedTuple):
    """Costs of one image, in seconds."""

    expected_call_s: float  # of a call, at the expected batch size
    min_call_s: float  # of a call, alone
    decode_s: float


CostsCache = dict[tuple[BatchKey, int], _ImageCosts]
"""Costs by batch key and rows of an image, valid while one list of images is sorted."""


@dataclass(frozen=True, slots=True)
class _Prediction:
    """Forecasts for one version of the request table."""

    version: int
    images: Mapping[ItemId, Forecast]
    requests: Mapping[str, Forecast]
    queue_positions: Mapping[ItemId, int]


@dataclass(slots=True)
class CompletionPredictor:
    """Predictions for the requests in `table`. The scheduler lowers `max_running` after joins ran out of memory."""

    table: RequestTable
    costs: CostModel
    policy: Policy
    max_running: int
    decode_batch: int
    _expected_batch_size: dict[BatchKey, float] = field(init=False, default_factory=dict)
    # Of the largest size in the last call of each key, to which its rows were padded.
    _call_keys: dict[BatchKey, BatchKey] = field(init=False, default_factory=dict)
    _last_iteration: tuple[float, float] = field(init=False, default=(0.0, 0.0))  # its end and its duration
    _correction: float = field(init=False, default=1.0)
    _cached: _Prediction = field(init=False, default=_Prediction(-1, {}, {}, {}))

    # Order.

    def sort_by_policy(self, images: Iterable[ItemId], now: float) -> list[ItemId]:
        """Sort `images` by the policy; images with equal keys, such as those of one request, keep their order."""
        keys: dict[tuple[str, int], float] = {}
        costs_cache: CostsCache = {}
        next_call = self.table.next_call

        def key(image: ItemId) -> float:
            cursor = image.attempt_id, next_call(image)
            if cursor not in keys:
                keys[cursor] = self.policy_key(*cursor, costs_cache, now)
            return keys[cursor]

        return sorted(images, key=key)

    def policy_key(self, attempt_id: str, call: int, costs_cache: CostsCache, now: float) -> float:
        """Sort key of the images of a request whose next call is `call`; fills `costs_cache`."""
        active = self.table.requests[attempt_id]
        request = active.request
        expected_s = min_s = 0.0
        for batch_key, calls in request.calls_by_key(call):
            cost_key = batch_key, request.rows
            if cost_key not in costs_cache:
                costs_cache[cost_key] = self._image_costs(*cost_key)
            expected_call_s, min_call_s, decode_s = costs_cache[cost_key]
            expected_s, min_s = expected_s + calls * expected_call_s, min_s + calls * min_call_s
        candidate = Candidate(
            active.arrived_at, request.deadline, request.priority, expected_s + decode_s, min_s + decode_s
        )
        return self.policy(candidate, now) + active.priority_penalty

    def _image_costs(self, batch_key: BatchKey, rows: int) -> _ImageCosts:
        call_key, min_call_s = self._call_keys.get(batch_key, batch_key), self.costs.step_s(batch_key, rows)
        expected_rows = min(round(self._expected_batch_size.get(call_key, 0.0)), self.costs.rows_limit(call_key))
        expected_call_s = self.costs.step_s(call_key, expected_rows) if expected_rows >= rows else min_call_s
        return _ImageCosts(expected_call_s, min(min_call_s, expected_call_s), self.costs.decode_s(batch_key))

    # Forecasts.

    def predict_requests(self, now: float) -> dict[str, Forecast]:
        """First start and last finish of each request, in seconds from now, with the learned correction."""
        return {attempt_id: self._corrected(each) for attempt_id, each in self.predict_uncorrected(now).items()}

    def predict_images(self, now: float) -> dict[ItemId, Forecast]:
        """Start and finish of each image, in seconds from now, with the learned correction."""
        return {image: self._corrected(each) for image, each in self._predict(now).images.items()}

    def _corrected(self, each: Forecast) -> Forecast:
        return Forecast(self._correction * each.start_in_s, self._correction * each.finish_in_s)

    def predict_uncorrected(self, now: float) -> Mapping[str, Forecast]:
        """First start and last finish of each request by the cost model alone, without the learned correction."""
        return self._predict(now).requests

    def predict_without(self, active: ActiveRequest, now: float) -> Mapping[str, Forecast]:
        """As `predict_uncorrected`, if `active`, the last request added to the table, were not in it."""
        cached = self._predict(now)
        self.table.remove(active.request.attempt_id)
        forecasts = self.predict_uncorrected(now)
        self.table.restore(active)
        self._cached = replace(cached, version=self.table.version)
        return forecasts

    def queue_positions(self, now: float) -> Mapping[ItemId, int]:
        """Waiting images, and the number of images that join before each."""
        return self._predict(now).queue_positions

    def to_simulated(self, image: ItemId, now: float) -> SimulatedImage:
        """Convert `image` to the input of a forecast."""
        active, running = self.table.requests[image.attempt_id], self.table.running.get(image)
        request = active.request
        deadline_s = request.deadline - now if request.deadline is not None and uses_deadlines(self.policy) else None
        call = 0 if running is None else running.call
        return SimulatedImage(
            image,
            request.step_key(call),
            request.rows,
            request.num_calls - call,
            running is not None,
            request.exclusive,
            deadline_s,
            needs_encode=active.needs_encode and running is None and image.index == 0,  # which joins first
            later_calls=request.second_stage_calls(call) if call < (request.second_stage_from or 0) else 0,
        )

    def _predict(self, now: float) -> _Prediction:
        """Forecast all images.

        The result stays valid while only time passes: work starts only when the engine loop runs.
        """
        if self._cached.version == self.table.version:
            return self._cached
        in_order = self.sort_by_policy((*self.table.running, *self.table.waiting), now)
        simulated = [self.to_simulated(image, now) for image in in_order]
        self._mix_sizes(simulated)
        waiting = [each.image for each in simulated if not each.running]
        images = forecast(simulated, self.max_running, self.costs, self._expected_batch_size, self.decode_batch)
        requests: dict[str, Forecast] = {}
        for image, each in images.items():
            other = requests.get(image.attempt_id)
            if other is None:
                requests[image.attempt_id] = each
            else:
                starts, finishes = (each.start_in_s, other.start_in_s), (each.finish_in_s, other.finish_in_s)
                requests[image.attempt_id] = Forecast(min(starts), max(finishes))
        self._cached = _Prediction(
            self.table.version, images, requests, {image: position for position, image in enumerate(waiting)}
        )
        return self._cached

    def _mix_sizes(self, images: Sequence[SimulatedImage]) -> None:
        """Set which sizes share calls: as those do now that run, and the next ones, as many as there are slots."""
        requests = {each.batch_key: self.table.request_of(each.image) for each in images}
        if all(request.call_size is None for request in requests.values()):
            return
        rows = Counter[BatchKey]()
        for each in sorted(images, key=lambda each: not each.running)[: self.max_running]:
            rows[each.batch_key] += each.rows
        largest = share_calls(rows, {key: request.call_key for key, request in requests.items()}, self.costs)
        for each in images:
            each.largest_key = largest.get(each.batch_key)

    # Durations.

    def unloaded_s(self, request: SchedulableRequest) -> float:
        """Duration of a request on an idle server, without the learned correction."""
        images = [
            SimulatedImage(
                ItemId(request.attempt_id, index),
                request.batch_key,
                request.rows,
                request.num_calls,
                needs_encode=request.has_start_image and index == 0,
                later_calls=request.second_stage_calls(0),
            )
            for index in range(request.num_images)
        ]
        done = forecast(images, self.max_running, self.costs, {}, self.decode_batch)
        return max(each.finish_in_s for each in done.values())

    @property
    def backlog_s(self) -> float:
        """Duration of all accepted work if no further request arrives."""
        return sum(
            self.device_time_s(active.request, self.table.calls_left(attempt_id), needs_encode=active.needs_encode)
            for attempt_id, active in self.table.requests.items()
        )

    def device_time_s(self, request: SchedulableRequest, calls: int, *, needs_encode: bool) -> float:
        """Device time that `calls` calls of a request take in full batches, and its start image if that is needed."""
        num_images = calls / request.num_calls
        steps_s = 0.0
        for batch_key, calls_of_key in request.calls_by_key(0):
            batch_size = max(min(self.costs.rows_limit(batch_key) // request.rows, self.max_running), 1)
            step_s = self.costs.step_s(batch_key, batch_size * request.rows) / batch_size
            steps_s += num_images * calls_of_key * step_s
        decodes_s = num_images * self.costs.decode_s(request.batch_key, self.decode_batch) / self.decode_batch
        encode_s = self.costs.image_encode_s(request.batch_key) if needs_encode else 0.0
        return self._correction * (steps_s + decodes_s + encode_s)

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
        self._expected_batch_size = {
            batch_key: rows * decay_factor for batch_key, rows in self._expected_batch_size.items()
        }
        self._last_iteration = now, seconds

    def forget_model(self, model: ModelKey) -> None:
        """Drop the expected batch sizes of a model without requests."""
        for values in (self._expected_batch_size, self._call_keys):
            for batch_key in [batch_key for batch_key in values if batch_key.model == model]:
                del values[batch_key]

    def record_finished(self, active: ActiveRequest, now: float) -> None:
        """Learn the correction from a finished request; one without a forecast is ignored."""
        if active.promised_forecast.finish_in_s > 0.0:
            ratio = (now - active.arrived_at) / active.promised_forecast.finish_in_s
            self._correction += _CORRECTION_WEIGHT * (min(max(ratio, 0.5), 2.0) - self._correction)
