"""Predicts the start and finish of each request, and the duration of the accepted work.

A call's duration is its curve of the cost model: an overhead, and seconds per token, padding included. The device time
of waiting texts is that of their tokens in batches that use the whole budget, times the *work ratio*: how much longer
measured batches took, because of padding and overhead. It is learned only from batches that left texts waiting, since
smaller ones say nothing of what a full queue takes. A request starts when a session is free and the work ahead of it is
done; the sessions share that work equally. Its texts may start earlier, as company of others: the *correction*, the
ratio of actual to predicted durations of requests that had to wait, accounts for that on average. It applies to
predictions that are shown. Deadlines are judged without it, by the longer time.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from noria.protocol.model_spec import ModelKey
from noria.scheduling.batch.text_table import ActiveRequest, TextTable
from noria.scheduling.costs import CostModel
from noria.scheduling.types import BatchKey, BatchPlan, RequestProgress

_LEARNING_WEIGHT = 0.05  # of one batch, or one request
_MIN_WORK_RATIO, _MAX_WORK_RATIO = 0.5, 8.0
# Durations are learned at powers of the square root of two: each is then measured often enough to average noise.
_POINTS_PER_OCTAVE = 2
_OVERHEAD_TOKENS = 10.0  # until measured: that of all-MiniLM-L6-v2 on a CPU


@dataclass(slots=True, eq=False)
class RunningBatch:
    """A batch in flight."""

    plan: BatchPlan
    members: tuple[ActiveRequest, ...]  # the request of each row
    started_at: float
    is_full: bool  # texts that could have shared it were left waiting
    expected_s: float

    def remaining_s(self, now: float) -> float:
        """Predicted time until it ends."""
        return max(self.started_at + self.expected_s - now, 0.0)


@dataclass(slots=True)
class FinishPredictor:
    """Predictions for the requests in `table`. The scheduler keeps `running`, by session."""

    table: TextTable
    costs: CostModel
    num_sessions: int
    max_rows: int
    token_budget: int
    running: dict[int, RunningBatch] = field(default_factory=dict)
    _token_limits: dict[BatchKey, int] = field(default_factory=dict)  # where the budget does not fit the memory
    _work_ratio: float = 1.1
    _full_batch_s: float = 0.0
    _correction: float = 1.0
    _last_batch_at: float = 0.0

    # Durations.

    def token_limit(self, batch_key: BatchKey) -> int:
        """Tokens of a batch, padding included: the budget, or fewer if that ran out of memory."""
        return self._token_limits.get(batch_key, self.token_budget)

    def record_oom(self, batch_key: BatchKey, padded_tokens: int) -> None:
        """Limit batches to half of `padded_tokens`, of a batch that ran out of memory, unless their limit is lower."""
        self._token_limits[batch_key] = max(min(self.token_limit(batch_key), padded_tokens // 2), 1)

    def batch_s(self, batch_key: BatchKey, padded_tokens: int) -> float:
        """Duration of a call; 0 if nothing is measured."""
        return self.costs.step_s(batch_key, padded_tokens)

    def overhead_tokens(self, batch_key: BatchKey) -> float:
        """Duration of a call beside that of its tokens, in tokens."""
        overhead = self.costs.step_overhead(batch_key)
        return _OVERHEAD_TOKENS if overhead is None else overhead

    def work_s(self, batch_key: BatchKey, num_tokens: int) -> float:
        """Time that `num_tokens` real tokens take if all sessions share them in full batches."""
        return self._work_ratio * self._ideal_s(batch_key, num_tokens) / self.num_sessions

    def _ideal_s(self, batch_key: BatchKey, num_tokens: int) -> float:
        """Device time of `num_tokens` tokens in batches of the whole budget, without padding."""
        limit = self.token_limit(batch_key)
        return num_tokens / limit * self.batch_s(batch_key, limit)

    @property
    def backlog_s(self) -> float:
        """Duration of all accepted work if no further request arrives; batches in flight count whole."""
        running_s = sum(running.expected_s for running in self.running.values()) / self.num_sessions
        return running_s + self._waiting_s

    @property
    def _waiting_s(self) -> float:
        return sum(self.work_s(*each) for each in self.table.waiting_tokens.items())

    def unloaded_s(self, active: ActiveRequest) -> float:
        """Duration of the waiting texts of a request on an idle server; it must have some."""
        batch_key, longest = active.request.batch_key, self.table.longest(active).num_tokens
        num_rows = math.ceil(len(active.waiting) / self.num_sessions)
        if num_rows <= self.max_rows and num_rows * longest <= self.token_limit(batch_key):
            return self.batch_s(batch_key, num_rows * longest)
        return max(self.work_s(batch_key, active.waiting_tokens), self.batch_s(batch_key, longest))

    # Requests.

    def progress(self, attempt_ids: Collection[str], now: float) -> dict[str, RequestProgress]:
        """Return the progress of those of `attempt_ids` that have not ended."""
        found = self.waiting_progress(attempt_ids, now, self._correction)
        for running in self.running.values():
            for active in running.members:
                attempt_id, remaining_s = active.request.attempt_id, running.remaining_s(now)
                if attempt_id in attempt_ids and self.table.requests.get(attempt_id) is active:
                    other = found.get(attempt_id, RequestProgress(None, 0, 0.0, 0.0))
                    found[attempt_id] = RequestProgress(
                        other.queue_position, 0, 0.0, max(other.finish_in_s, remaining_s)
                    )
        return found

    def waiting_progress(
        self, attempt_ids: Collection[str], now: float, correction: float = 1.0
    ) -> dict[str, RequestProgress]:
        """Return the progress of the waiting texts of those of `attempt_ids` that have any.

        `correction` multiplies the predictions of requests that have work ahead of them.
        """
        free_s = 0.0
        if len(self.running) == self.num_sessions or any(each.plan.is_alone for each in self.running.values()):
            free_s = min(running.remaining_s(now) for running in self.running.values())
        wanted = {name for name in attempt_ids if (known := self.table.requests.get(name)) and known.waiting}
        found: dict[str, RequestProgress] = {}
        ahead_s, num_ahead = self._waiting_s, self.table.num_waiting
        for active in self.table.in_reverse_order():  # new requests, which are asked for most, are usually last
            if not wanted:
                break
            request, num_waiting = active.request, len(active.waiting)
            ahead_s -= self.work_s(request.batch_key, active.waiting_tokens)
            num_ahead -= num_waiting
            if request.attempt_id in wanted:
                wanted.remove(request.attempt_id)
                start_s, finish_s = free_s, free_s + self.unloaded_s(active)
                if num_ahead:  # it shares a batch with others, and ends with them
                    start_s = correction * (free_s + ahead_s)
                    finish_s = start_s + correction * max(self.unloaded_s(active), self._full_batch_s)
                found[request.attempt_id] = RequestProgress(num_ahead + num_waiting - 1, 0, start_s, finish_s)
        return found

    # Learning.

    def record_batch(self, running: RunningBatch, seconds: float, now: float) -> None:
        """Learn from an executed batch."""
        plan, self._last_batch_at = running.plan, now
        if running.is_full:
            ratio = seconds / (self._ideal_s(plan.batch_key, sum(plan.num_tokens)) or seconds)
            self._work_ratio += _LEARNING_WEIGHT * (
                min(max(ratio, _MIN_WORK_RATIO), _MAX_WORK_RATIO) - self._work_ratio
            )
            self._full_batch_s += _LEARNING_WEIGHT * (seconds - self._full_batch_s) if self._full_batch_s else seconds
        point = round(2 ** (round(_POINTS_PER_OCTAVE * math.log2(plan.padded_tokens)) / _POINTS_PER_OCTAVE))
        overhead = self.overhead_tokens(plan.batch_key)
        scale = (overhead + point) / (overhead + plan.padded_tokens)
        self.costs.observe_step(plan.batch_key, point, scale * seconds)

    def record_promise(self, active: ActiveRequest, now: float) -> None:
        """Keep the prediction for a new request, if others wait before it."""
        progress = self.waiting_progress([active.request.attempt_id], now)[active.request.attempt_id]
        active.promised_s = progress.finish_in_s if progress.queue_position != active.request.num_images - 1 else 0.0

    def forget_model(self, model: ModelKey) -> None:
        """Drop the costs and token limits of a model without requests."""
        self.costs.forget(model)
        self._token_limits = {key: limit for key, limit in self._token_limits.items() if key.model != model}
        for batch_key in [batch_key for batch_key in self.table.waiting_tokens if batch_key.model == model]:
            del self.table.waiting_tokens[batch_key]

    def record_finished(self, active: ActiveRequest, now: float) -> None:
        """Learn the correction from a finished request."""
        if active.promised_s:
            ratio = (now - active.arrived_at) / active.promised_s
            self._correction += _LEARNING_WEIGHT * (min(max(ratio, 0.5), 2.0) - self._correction)

    def decay(self, now: float) -> None:
        """Decay the slowdown for the idle time since the last batch or `decay`."""
        self.costs.decay_slowdown(now - self._last_batch_at)
        self._last_batch_at = now
