"""Predicts the start and finish of each request, and the duration of the accepted work.

A call's duration is its curve of the cost model: an overhead, and seconds per token, padding included, which models
that pack do not have. The device time of waiting texts is that of their tokens in batches that use the whole budget,
times the *work ratio*: how much longer measured batches took, because of padding and overhead. It is learned only from
batches that left texts waiting, since smaller ones say nothing of what a full queue takes. A request starts when a
session is free and the work ahead of it is done; the sessions share that work equally. Its texts may start earlier, as
company of others, or later, behind texts that others send: the *corrections* (`corrections.py`), of requests that had
to wait, account for that on average. They apply to predictions that are shown. Deadlines are judged without them.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from noria.protocol.model_spec import ModelKey
from noria.scheduling.batch.text_table import ActiveRequest, TextTable
from noria.scheduling.corrections import Corrections
from noria.scheduling.costs import CostModel
from noria.scheduling.types import BatchKey, BatchPlan, RequestProgress

_LEARNING_WEIGHT = 0.05  # weight of one batch
_MIN_WORK_RATIO, _MAX_WORK_RATIO = 0.5, 8.0
# Durations are learned at powers of the square root of two: each is then measured often enough to average noise.
_POINTS_PER_OCTAVE = 2
_OVERHEAD_TOKENS = 10.0  # until measured: that of all-MiniLM-L6-v2 on a CPU
_OVERHEAD_INTERVAL = 16  # batches between two looks at the overhead, which one of them hardly changes


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
    # Durations of calls by batch key and tokens, until one is learned: each new request asks for the same few.
    _batch_s: dict[tuple[BatchKey, int], float] = field(default_factory=dict)
    _token_s: dict[BatchKey, float] = field(default_factory=dict)  # seconds of a token as `work_s` has it; likewise
    _overhead_tokens: dict[BatchKey, float] = field(default_factory=dict)  # for `_OVERHEAD_INTERVAL` batches
    _num_batches: int = 0  # learned from
    _token_limits: dict[BatchKey, int] = field(default_factory=dict)  # where the budget does not fit the memory
    _work_ratio: float = 1.1
    _full_batch_s: float = 0.0
    _corrections: Corrections = field(default_factory=Corrections)
    _last_batch_at: float = 0.0

    # Durations.

    def token_limit(self, batch_key: BatchKey) -> int:
        """Tokens of a batch, padding included: the budget, or fewer if that ran out of memory."""
        return self._token_limits.get(batch_key, self.token_budget)

    def record_oom(self, batch_key: BatchKey, padded_tokens: int) -> None:
        """Limit batches to half of `padded_tokens`, of a batch that ran out of memory, unless their limit is lower."""
        self._token_limits[batch_key] = max(min(self.token_limit(batch_key), padded_tokens // 2), 1)
        self._forget_durations()

    def batch_s(self, batch_key: BatchKey, padded_tokens: int) -> float:
        """Duration of a call; 0 if nothing is measured."""
        seconds = self._batch_s.get((batch_key, padded_tokens))
        if seconds is None:
            seconds = self._batch_s[batch_key, padded_tokens] = self.costs.step_s(batch_key, padded_tokens)
        return seconds

    def overhead_tokens(self, batch_key: BatchKey) -> float:
        """Duration of a call beside that of its tokens, in tokens."""
        tokens = self._overhead_tokens.get(batch_key)
        if tokens is None:
            tokens = self.costs.step_overhead(batch_key)
            if tokens is None:
                return _OVERHEAD_TOKENS
            self._overhead_tokens[batch_key] = tokens
        return tokens

    def work_s(self, batch_key: BatchKey, num_tokens: int) -> float:
        """Time that `num_tokens` real tokens take if all sessions share them in full batches."""
        token_s = self._token_s.get(batch_key)
        if token_s is None:
            token_s = self._token_s[batch_key] = self._work_ratio * self._ideal_s(batch_key, 1) / self.num_sessions
        return token_s * num_tokens

    def _ideal_s(self, batch_key: BatchKey, num_tokens: int) -> float:
        """Device time of `num_tokens` tokens in batches of the whole budget, without padding."""
        limit = self.token_limit(batch_key)
        return num_tokens / limit * self.batch_s(batch_key, limit)

    @property
    def has_idle_session(self) -> bool:
        """Whether another batch can start beside those in flight."""
        if len(self.running) == self.num_sessions:
            return False
        for each in self.running.values():  # noqa: SIM110 - a generator takes longer than the rest
            if each.plan.is_alone:
                return False
        return True

    @property
    def backlog_s(self) -> float:
        """Duration of all accepted work if no further request arrives; batches in flight count whole."""
        running_s = sum([running.expected_s for running in self.running.values()]) / self.num_sessions
        return running_s + self._waiting_s

    @property
    def _waiting_s(self) -> float:
        return self._tokens_s(self.table.waiting_tokens)

    def waiting_s_of(self, client: str) -> float:
        """Time that the waiting texts of a client take if all sessions share them in full batches."""
        return self._tokens_s(self.table.tokens_by_client.get(client, {}))

    def _tokens_s(self, tokens: Mapping[BatchKey, int]) -> float:
        waiting_s = 0.0
        for batch_key, num_tokens in tokens.items():
            if num_tokens:
                waiting_s += self.work_s(batch_key, num_tokens)
        return waiting_s

    def _forget_durations(self) -> None:
        self._batch_s.clear()
        self._token_s.clear()

    def unloaded_s(self, active: ActiveRequest) -> float:
        """Duration of the waiting texts of a request on an idle server; it must have some."""
        batch_key, longest = active.request.batch_key, active.longest
        num_rows = -(-len(active.waiting) // self.num_sessions)
        num_tokens = num_rows * longest
        if batch_key.model in self.costs.packed_models:
            num_tokens = max(-(-active.waiting_tokens // self.num_sessions), longest)
        if num_rows <= self.max_rows and num_tokens <= self.token_limit(batch_key):
            return self.batch_s(batch_key, num_tokens)
        return max(self.work_s(batch_key, active.waiting_tokens), self.batch_s(batch_key, longest))

    # Requests.

    def progress(self, attempt_ids: Collection[str], now: float) -> dict[str, RequestProgress]:
        """Return the progress of those of `attempt_ids` that have not ended."""
        found = self.waiting_progress(attempt_ids, now, self._corrections)
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
        self, attempt_ids: Collection[str], now: float, corrections: Corrections | None = None
    ) -> dict[str, RequestProgress]:
        """Return the progress of the waiting texts of those of `attempt_ids` that have any.

        `corrections` are those of requests that have work ahead of them.
        """
        wanted = {name for name in attempt_ids if (known := self.table.requests.get(name)) and known.waiting}
        found: dict[str, RequestProgress] = {}
        free_s, ahead_s, num_ahead = self._free_s(now), self._waiting_s, self.table.num_waiting
        for active in self.table.in_reverse_order():
            if not wanted:
                break
            ahead_s -= self.work_s(active.request.batch_key, active.waiting_tokens)
            num_ahead -= len(active.waiting)
            if (attempt_id := active.request.attempt_id) in wanted:
                wanted.remove(attempt_id)
                factor = corrections.of(active.request.client) if num_ahead and corrections is not None else 1.0
                start_s = free_s + ahead_s if num_ahead else free_s
                finish_s = start_s + self._own_s(active, num_ahead)
                position = num_ahead + len(active.waiting) - 1
                found[attempt_id] = RequestProgress(position, 0, factor * start_s, factor * finish_s)
        return found

    def _free_s(self, now: float) -> float:
        return 0.0 if self.has_idle_session else min([each.remaining_s(now) for each in self.running.values()])

    def _own_s(self, active: ActiveRequest, num_ahead: int) -> float:
        """Seconds of a request from its start: behind others it shares a batch with them, and ends with them."""
        return max(self.unloaded_s(active), self._full_batch_s) if num_ahead else self.unloaded_s(active)

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
        self._forget_durations()
        self._num_batches += 1
        if self._num_batches % _OVERHEAD_INTERVAL == 0:
            self._overhead_tokens.clear()

    def record_promise(self, active: ActiveRequest, now: float) -> None:
        """Keep the predictions for a new request."""
        ahead_s, num_ahead = 0.0, self.table.num_waiting - len(active.waiting)
        if num_ahead:
            ahead_s = self._waiting_s - self.work_s(active.request.batch_key, active.waiting_tokens)
            for each in self.table.behind(active):
                ahead_s -= self.work_s(each.request.batch_key, each.waiting_tokens)
                num_ahead -= len(each.waiting)
        finish_s = self._free_s(now) + (ahead_s if num_ahead else 0.0) + self._own_s(active, num_ahead)
        active.predicted_s = self._corrections.of(active.request.client) * finish_s if num_ahead else finish_s
        active.promised_s = finish_s if num_ahead else 0.0

    def forget_model(self, model: ModelKey) -> None:
        """Drop the costs and token limits of a model without requests."""
        self.costs.forget(model)
        self._forget_durations()
        self._overhead_tokens.clear()
        self._token_limits = {key: limit for key, limit in self._token_limits.items() if key.model != model}
        for batch_key in [batch_key for batch_key in self.table.waiting_tokens if batch_key.model == model]:
            del self.table.waiting_tokens[batch_key]

    def record_finished(self, active: ActiveRequest, now: float) -> None:
        """Learn the correction from a finished request."""
        self._corrections.learn(active.request.client, now - active.arrived_at, active.promised_s)

    def decay(self, now: float) -> None:
        """Decay the slowdown for the idle time since the last batch or `decay`."""
        self.costs.decay_slowdown(now - self._last_batch_at)
        self._forget_durations()
        self._last_batch_at = now
