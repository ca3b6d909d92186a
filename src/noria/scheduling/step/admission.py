"""What is to be expected: in which order images go, when each request will be done, how long the work lasts, and who must be refused.

Reads the crowd and the cost model; changes neither the crowd nor time. Learns two things of its own: the *company*, the rows that a
turn usually has, and the *bias*, by which finished requests took longer than was promised.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from noria.scheduling.costs import CostModel
from noria.scheduling.policies import COST_UNCERTAINTY, Candidate, Policy, uses_deadlines
from noria.scheduling.step.forecast import Forecast, SimulatedImage, forecast
from noria.scheduling.step.request_table import ActiveRequest, RequestTable
from noria.scheduling.types import BatchKey, FinishReason, ImageId, RequestFinished, SchedulableRequest

_BATCH_SIZE_ITERATIONS = 30.0  # over which the usual company is averaged
_CORRECTION_WEIGHT = 0.05  # of one finished request
_ROUNDING_S = 1e-6  # what rounding may make of no delay at all


class _ImageCosts(NamedTuple):
    """Of one image of a kind, in seconds."""

    expected_call_s: float  # a call, in the usual company
    min_call_s: float  # a call, alone
    decode_s: float


@dataclass(frozen=True, slots=True)
class _Prediction:
    """What was foreseen as of one version of the crowd."""

    version: int
    images: Mapping[ImageId, Forecast]
    requests: Mapping[str, Forecast]
    queue_positions: Mapping[ImageId, int]


@dataclass(slots=True)
class CompletionPredictor:
    """`most_seated` may be lowered when boarding did not fit the memory."""

    table: RequestTable
    costs: CostModel
    policy: Policy
    max_running: int
    decode_batch: int
    _expected_batch_size: dict[BatchKey, float] = field(init=False, default_factory=dict)
    _last_iteration: tuple[float, float] = field(init=False, default=(0.0, 0.0))  # when it ended, how long it took
    _correction: float = field(init=False, default=1.0)
    _cached: _Prediction = field(init=False, default=_Prediction(-1, {}, {}, {}))

    # Order.

    def sort_by_policy(self, images: Iterable[ImageId], now: float) -> list[ImageId]:
        """`images` as the policy has them go; those of one request, and equals, in the order given."""
        keys: dict[tuple[str, int], float] = {}
        costs_cache: dict[tuple[BatchKey, int], _ImageCosts] = {}
        next_call = self.table.next_call

        def key(image: ImageId) -> float:
            cursor = image.request_id, next_call(image)
            if cursor not in keys:
                keys[cursor] = self._policy_key(*cursor, costs_cache, now)
            return keys[cursor]

        return sorted(images, key=key)

    def to_simulated(self, image: ImageId, now: float) -> SimulatedImage:
        """`image` as a forecast takes it."""
        request, running = self.table.request_of(image), self.table.running.get(image)
        deadline_s = request.deadline - now if request.deadline is not None and uses_deadlines(self.policy) else None
        if running is None:
            return SimulatedImage(
                image,
                request.batch_key,
                request.rows,
                request.num_calls,
                exclusive=request.exclusive,
                deadline_s=deadline_s,
            )
        calls = request.num_calls - running.call
        return SimulatedImage(image, request.batch_key, request.rows, calls, True, request.exclusive, deadline_s)

    def _policy_key(
        self, request_id: str, call: int, costs_cache: dict[tuple[BatchKey, int], _ImageCosts], now: float
    ) -> float:
        active = self.table.requests[request_id]
        request = active.request
        cost_key = request.batch_key, request.rows
        if cost_key not in costs_cache:
            costs_cache[cost_key] = self._image_costs(*cost_key)
        expected_call_s, min_call_s, decode_s = costs_cache[cost_key]
        calls = request.num_calls - call
        candidate = Candidate(
            active.arrived_at,
            request.deadline,
            request.priority,
            calls * expected_call_s + decode_s,
            calls * min_call_s + decode_s,
        )
        return self.policy(candidate, now) + active.priority_penalty

    def _image_costs(self, batch_key: BatchKey, rows: int) -> _ImageCosts:
        """What a call takes an image, in the usual company and alone, and what decoding it takes."""
        expected_rows = min(round(self._expected_batch_size.get(batch_key, 0.0)), self.costs.rows_limit(batch_key))
        expected_call_s = self.costs.step_s(batch_key, max(expected_rows, rows))
        return _ImageCosts(
            expected_call_s, min(self.costs.step_s(batch_key, rows), expected_call_s), self.costs.decode_s(batch_key)
        )

    def deprioritize(self, newcomer: ActiveRequest, late_ids: Iterable[str], now: float) -> None:
        """Have `newcomer` go after those whom it would make `late`."""
        promised = [image for request_id in late_ids for image in self.table.requests[request_id].images]
        costs_cache: dict[tuple[BatchKey, int], _ImageCosts] = {}
        last = max(
            self._policy_key(image.request_id, self.table.next_call(image), costs_cache, now) for image in promised
        )
        newcomer.priority_penalty = max(
            last + _ROUNDING_S - self._policy_key(newcomer.request.request_id, 0, costs_cache, now), 0.0
        )
        self.table.bump_version()

    # Forecasts.

    def predict_requests(self, now: float) -> dict[str, Forecast]:
        """Each request's first start and last finish, in seconds from now."""
        return {request_id: self._corrected(each) for request_id, each in self.predict_uncorrected(now).items()}

    def predict_images(self, now: float) -> dict[ImageId, Forecast]:
        """The same of each image."""
        return {image: self._corrected(each) for image, each in self._predict(now).images.items()}

    def _corrected(self, each: Forecast) -> Forecast:
        return Forecast(self._correction * each.start_in_s, self._correction * each.finish_in_s)

    def predict_uncorrected(self, now: float) -> Mapping[str, Forecast]:
        """The same as the cost model has it, without what was learned of its errors."""
        return self._predict(now).requests

    def queue_positions(self, now: float) -> Mapping[ImageId, int]:
        """The waiting images, and how many board before each."""
        return self._predict(now).queue_positions

    def _predict(self, now: float) -> _Prediction:
        """Ahead; what was seen holds as long as nothing changes but time, since what was foreseen starts only when the wheel turns."""
        if self._cached.version == self.table.version:
            return self._cached
        in_order = self.sort_by_policy((*self.table.running, *self.table.waiting), now)
        simulated = [self.to_simulated(image, now) for image in in_order]
        waiting = [each.image for each in simulated if not each.running]
        images = forecast(simulated, self.max_running, self.costs, self._expected_batch_size, self.decode_batch)
        requests: dict[str, Forecast] = {}
        for image, each in images.items():
            other = requests.get(image.request_id)
            if other is None:
                requests[image.request_id] = each
            else:
                starts, finishes = (each.start_in_s, other.start_in_s), (each.finish_in_s, other.finish_in_s)
                requests[image.request_id] = Forecast(min(starts), max(finishes))
        self._cached = _Prediction(
            self.table.version, images, requests, {image: position for position, image in enumerate(waiting)}
        )
        return self._cached

    def _unloaded_s(self, request: SchedulableRequest) -> float:
        """How long the request would take if nobody else were here, nor usual."""
        images = [
            SimulatedImage(ImageId(request.request_id, index), request.batch_key, request.rows, request.num_calls)
            for index in range(request.num_images)
        ]
        done = forecast(images, self.max_running, self.costs, {}, self.decode_batch)
        return max(each.finish_in_s for each in done.values())

    @property
    def backlog_s(self) -> float:
        """How long everything that was accepted takes, if nobody else comes."""
        return sum(
            self._device_time_s(active.request, self.table.calls_left(request_id))
            for request_id, active in self.table.requests.items()
        )

    def _device_time_s(self, request: SchedulableRequest, calls: int) -> float:
        """What `calls` calls of a request take off the device, in full batches."""
        batch_size = max(min(self.costs.rows_limit(request.batch_key) // request.rows, self.max_running), 1)
        decodes = (
            calls / request.num_calls * self.costs.decode_s(request.batch_key, self.decode_batch) / self.decode_batch
        )
        return self._correction * (
            calls * self.costs.step_s(request.batch_key, batch_size * request.rows) / batch_size + decodes
        )

    # Refusals: what a newcomer is told, or None.

    def refuse_for_backlog(self, request: SchedulableRequest, limit_s: float) -> RequestFinished | None:
        """The queue would hold more than `limit_s` of work; to an empty queue anybody may come."""
        if not self.table.waiting or math.isinf(limit_s):
            return None
        backlog_s, added_s = self.backlog_s, self._device_time_s(request, request.num_calls * request.num_images)
        if backlog_s + added_s <= limit_s:
            return None
        message = f"the queue is full: {backlog_s:.1f} s of work are ahead, {limit_s:g} s may be; this request is {added_s:.1f} s more"
        wait_s = min(backlog_s + added_s - limit_s, backlog_s)  # until it fits, or until nobody waits
        return RequestFinished(request.request_id, FinishReason.REFUSED, message, retry_after_s=wait_s)

    def refuse_for_deadline(
        self, request: SchedulableRequest, late_ids: Sequence[str], now: float
    ) -> RequestFinished | None:
        """The newcomer, who has entered the crowd, would be late, or would make others `late`."""
        if request.deadline is None:
            return None
        remaining_s, finish_s = request.deadline - now, self._finish_s(request.request_id, now)
        if finish_s > remaining_s:
            unloaded_s = self._unloaded_s(request)
            message = f"it would be done in {finish_s:.2f} s, {max(remaining_s, 0.0):.2f} s are left"
            if unloaded_s > remaining_s:
                message += f"; even with nobody else here it takes {unloaded_s:.2f} s"
                return RequestFinished(request.request_id, FinishReason.UNMEETABLE, message)
            return RequestFinished(
                request.request_id, FinishReason.UNMEETABLE, message, retry_after_s=finish_s - remaining_s
            )
        if late_ids:
            message = "it could be in time only by making another late, which was accepted before"
            wait_s = max(self._time_to_deadline_s(request_id, now) for request_id in late_ids)
            return RequestFinished(request.request_id, FinishReason.UNMEETABLE, message, retry_after_s=wait_s)
        return None

    def deadlines_broken_by(self, newcomer: ActiveRequest, now: float) -> list[str]:
        """Who was promised a time that could be kept before `newcomer` entered, and cannot be now; in doubt, it could."""
        own_id = newcomer.request.request_id
        finishes_s = {name: self._finish_s(name, now) for name in self.table.requests if name != own_id}
        late = {name: each for name, each in finishes_s.items() if each > self._time_to_deadline_s(name, now)}
        if not late:
            return []
        cached = self._cached
        self.table.remove(own_id)
        earlier = {name: self._finish_s(name, now) for name in late}
        self.table.restore(newcomer)
        self._cached = replace(cached, version=self.table.version)
        return [
            name
            for name, before_s in earlier.items()
            if before_s + _ROUNDING_S < late[name]
            and COST_UNCERTAINTY * before_s <= self._time_to_deadline_s(name, now)
        ]

    def _finish_s(self, request_id: str, now: float) -> float:
        """As promises reckon, without the bias: that those without a deadline were late is because others are kept."""
        return self.predict_uncorrected(now)[request_id].finish_in_s

    def _time_to_deadline_s(self, request_id: str, now: float) -> float:
        deadline = self.table.requests[request_id].request.deadline
        return math.inf if deadline is None else deadline - now

    # Learning.

    def record_iteration(self, batch_key: BatchKey, rows: int, seconds: float, now: float) -> None:
        """A turn ended `now` that took `seconds`; classes that have nobody here are on their way to be forgotten."""
        self._last_iteration = now, seconds
        active_keys = {running.request.batch_key for running in self.table.running.values()} - {batch_key}
        for other, expected_rows in self._expected_batch_size.items():
            self._expected_batch_size[other] = (
                expected_rows if other in active_keys else (1 - 1 / _BATCH_SIZE_ITERATIONS) * expected_rows
            )
        self._expected_batch_size[batch_key] = (
            self._expected_batch_size.get(batch_key, 0.0) + rows / _BATCH_SIZE_ITERATIONS
        )

    def decay(self, now: float) -> None:
        """Nobody was here since the last turn: the usual company fades."""
        ended, seconds = self._last_iteration
        self.costs.decay_slowdown(now - ended if seconds > 0.0 else 0.0)
        decay_factor = math.exp(-max(now - ended, 0.0) / (_BATCH_SIZE_ITERATIONS * seconds)) if seconds > 0.0 else 1.0
        self._expected_batch_size = {
            batch_key: rows * decay_factor for batch_key, rows in self._expected_batch_size.items()
        }
        self._last_iteration = now, seconds

    def record_finished(self, active: ActiveRequest, now: float) -> None:
        """A request is done, about which something was promised."""
        if active.promised_forecast.finish_in_s > 0.0:
            ratio = (now - active.arrived_at) / active.promised_forecast.finish_in_s
            self._correction += _CORRECTION_WEIGHT * (min(max(ratio, 0.5), 2.0) - self._correction)
