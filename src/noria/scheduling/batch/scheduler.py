"""The batch scheduler: decides which waiting texts share the next model call.

Rules:
  - A batch starts as soon as a session is idle. Only while another batch runs may it wait for company, at most
    `max_wait_s`, and not once it is full; a text never waits while the device is idle.
  - The first request in the policy's order, without deadlines and priorities the oldest, leads: its longest waiting
    text is in the batch. So no request starves.
  - Its company are texts of its model and priority, of similar length (`selection.py`) or, without padding, the next:
    at most `max_rows`, at most `token_budget` tokens, padding included, and no more than the leader's deadline allows
    or than their company is worth. They are of the first requests only (`_POOL_BATCHES`), so that a text of a rare
    length is not overtaken by all others. Texts of other priorities take rows that make the batch no longer.
  - No batch takes more than its session's share of all texts in flight and waiting: an idle session must find work.
    So the texts of one request can be in several batches.
  - A request that would wait too long, miss its deadline, or make another miss an accepted one, is rejected at once
    (`admission.py`).
  - A request that is cancelled, expired or failed is not in the next plan, with none of its texts.
  - A batch that runs out of memory is tried again in batches of half the tokens; a text that does not fit beside
    another batch is tried alone; only one that does not fit alone fails.
  - After `_NUM_LONE` batches in a row that had the device for themselves, with nothing waiting, the next one that is
    all that waits may use the threads of all sessions: it is `is_alone`, and the texts that come meanwhile wait for it.
  - An `exclusive` request waits until no other is in flight, and no other runs until it has ended.
  - Every `submit` ends in exactly one `RequestFinished`.

Time is monotonic seconds and always an argument. What a session is and how a text is encoded is not known here.
"""

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from noria.protocol.model_spec import ModelKey
from noria.scheduling.batch.admission import AdmissionControl
from noria.scheduling.batch.predictor import FinishPredictor, RunningBatch
from noria.scheduling.batch.selection import BatchLimits, num_to_fill, num_to_pack, select_window
from noria.scheduling.batch.text_table import ActiveRequest, Rank, TextTable, WaitingText
from noria.scheduling.costs import CostModel
from noria.scheduling.policies import (
    COST_UNCERTAINTY,
    INFEASIBLE_PENALTY_S,
    Candidate,
    Policy,
    least_slack,
    shares_fairly,
    uses_deadlines,
)
from noria.scheduling.shares.fair_shares import NO_TURN, FairShares, Turn
from noria.scheduling.types import (
    BatchPlan,
    BatchResult,
    BatchSnapshot,
    FinishReason,
    ItemId,
    RequestFinished,
    RequestProgress,
    RequestTimings,
    RunningBatchSnapshot,
    SchedulableRequest,
    WaitingRequestSnapshot,
)

_NUM_LONE = 3
# Tokens of a lone batch that gets all threads, padding included. They spin while they wait for each other: with fewer
# tokens they would keep the cores from others, such as a model that loads at a low priority, for little.
_LONE_MIN_TOKENS = 32
# A batch is chosen from so many times as many requests as it has rows. With more, padding is less and the 99th
# percentile higher: 128 users, 173 texts/s and 1.57 s without a bound, 166 and 1.16 with 6, 163 and 1.08 with 4
# (`noria_bench.micro.batch_scheduling`).
_POOL_BATCHES = 6


@dataclass(slots=True)
class BatchScheduler:
    """Plans batches; executes nothing.

    Up to `num_sessions` plans are in flight; each is committed once, in any order. All calls can come between them.
    """

    num_sessions: int = 2
    max_rows: int = 8
    token_budget: int = 512  # tokens of a batch, padding included
    is_faster_alone: bool = False  # whether a lone batch gets the threads of all sessions
    max_wait_s: float = 0.0  # for which a batch waits for company while another one runs
    queue_limit: int = 8192  # texts that may wait
    queue_limit_s: float = math.inf  # seconds of work that may be accepted while a text waits
    policy: Policy = least_slack
    costs: CostModel = field(default_factory=CostModel)
    _table: TextTable = field(init=False, default_factory=TextTable)
    _predictor: FinishPredictor = field(init=False)
    _admission: AdmissionControl = field(init=False)
    _shares: FairShares = field(init=False, default_factory=FairShares)
    _turns: dict[str, dict[int, Turn]] = field(init=False, default_factory=dict)  # turns of the parts of each request
    _is_fair: bool = field(init=False)  # whether clients share the device
    _wait_ends_at: float | None = field(init=False, default=None)
    _num_lone: int = field(init=False, default=0)  # batches in a row

    def __post_init__(self) -> None:
        self._predictor = FinishPredictor(self._table, self.costs, self.num_sessions, self.max_rows, self.token_budget)
        self._is_fair = shares_fairly(self.policy)
        shares = self._shares if self._is_fair else None
        self._admission = AdmissionControl(self._table, self._predictor, self.queue_limit, self.queue_limit_s, shares)

    @property
    def num_slots(self) -> int:
        """The largest number of texts that can be in flight."""
        return self.num_sessions * self.max_rows

    @property
    def num_waiting(self) -> int:
        """Number of texts that are in no batch."""
        return self._table.num_waiting

    @property
    def num_running(self) -> int:
        """Number of texts in flight, including those of requests that have ended meanwhile."""
        return sum(len(running.plan.rows) for running in self._predictor.running.values())

    @property
    def backlog_s(self) -> float:
        """Predicted duration of all accepted work if no further request arrives."""
        return self._predictor.backlog_s

    def oldest_age_s(self, now: float) -> float:
        """Age of the oldest request with a waiting text; 0 if there is none."""
        return max(0.0, now - min((active.arrived_at for active in self._table.in_order()), default=now))

    def submit(self, request: SchedulableRequest, now: float, arrived_at: float | None = None) -> list[RequestFinished]:
        """Accept a request or reject it at once. Its waiting time counts from `arrived_at`, by default from `now`."""
        assert request.attempt_id not in self._table.requests, request.attempt_id
        assert len(request.num_tokens) == request.num_images > 0, request
        if not self._table.requests and not self._predictor.running:
            self._predictor.decay(now)
        else:
            self._num_lone = 0
        arrived_at = now if arrived_at is None else arrived_at
        rejection = self._admission.reject_for_queue(request)
        if rejection is None:
            turns = self._take_turns(request, arrived_at)
            ranks = tuple([self._rank(request, arrived_at, turn) for turn in turns.values()])
            rejection = self._admission.admit(request, arrived_at, ranks, self.max_rows, now)
            if rejection is None:
                self._turns[request.attempt_id] = turns
                return []
            self._leave(request, turns, unused=True)
        return [msgspec.structs.replace(rejection, finished_at=now, timings=RequestTimings(queue_s=now - arrived_at))]

    def cancel(self, attempt_id: str, now: float) -> list[RequestFinished]:
        """End a request; do nothing if it is unknown or has ended."""
        return self._finish(attempt_id, FinishReason.CANCELLED, "cancelled by the caller", now)

    def expire(self, now: float) -> list[RequestFinished]:
        """End every request whose `expires_at` has passed."""
        expired = {
            attempt_id: active.request.expires_at - active.arrived_at
            for attempt_id, active in self._table.requests.items()
            if active.request.expires_at is not None and active.request.expires_at <= now
        }
        message = "it did not finish within {:.3f} s: allow more time, or send fewer texts"
        return [
            event
            for attempt_id, allowed_s in expired.items()
            for event in self._finish(attempt_id, FinishReason.EXPIRED, message.format(allowed_s), now)
        ]

    def forget_model(self, model: ModelKey) -> None:
        """Drop what was learned of a model, of which no request runs or waits."""
        self._predictor.forget_model(model)

    def plan(self, now: float) -> BatchPlan | None:
        """Return the next batch, or None: nothing waits, every session is busy, or the batch waits.

        Call it again until it returns None, after every commit and submit, and at `next_deadline`.
        """
        self._wait_ends_at = None
        running = self._predictor.running
        if not self._predictor.has_idle_session or (leader := self._select_leader(now)) is None:
            return None
        if running:
            in_flight = {active for batch in running.values() for active in batch.members} - {leader}
            if in_flight and (leader.exclusive or any(active.exclusive for active in in_flight)):
                return None  # until the batches in flight are committed
        session = next(number for number in range(self.num_sessions) if number not in running)
        texts, is_full = self._select_texts(leader, now)
        if running and not is_full and (wait_ends_at := self._end_of_wait(leader)) > now:
            self._wait_ends_at = wait_ends_at
            return None
        batch_key = leader.request.batch_key
        rows, num_tokens = tuple([text.row for text in texts]), tuple([text.num_tokens for text in texts])
        plan = BatchPlan(session, batch_key, rows, num_tokens, is_packed=batch_key.model in self.costs.packed_models)
        members = tuple([self._table.requests[text.attempt_id] for text in texts])
        self._table.take(texts)
        if self.is_faster_alone and not running and not self._table.num_waiting and self._num_lone >= _NUM_LONE:
            plan = msgspec.structs.replace(plan, is_alone=plan.padded_tokens >= _LONE_MIN_TOKENS)
        expected_s = self._predictor.batch_s(batch_key, plan.padded_tokens)
        running[session] = RunningBatch(plan, members, now, self._table.waiting_tokens[batch_key] > 0, expected_s)
        return plan

    def next_deadline(self) -> float | None:
        """Return when to call `plan` again, if its last call returned None because a batch waits for company."""
        return self._wait_ends_at

    def commit(self, plan: BatchPlan, result: BatchResult, now: float, seconds: float = 0.0) -> list[RequestFinished]:
        """Apply the result of an executed plan, which took `seconds`. Requests that have ended are skipped."""
        running = self._predictor.running.pop(plan.session)
        assert running.plan is plan, "not in flight"
        if not result.fits:
            return self._handle_oom(running, now)
        if self._shares.weight:
            self._shares.advance(self._predictor.work_s(plan.batch_key, sum(plan.num_tokens)))
        if not self._predictor.running and not self._table.num_waiting:
            self._num_lone += 1
        if seconds > 0.0 and result.is_timed and not result.failed and not plan.is_alone:
            self._predictor.record_batch(running, seconds, now)
        events: list[RequestFinished] = []
        for row, active in zip(plan.rows, running.members, strict=True) if result.failed else ():
            if row in result.failed and self._is_open(active):
                message = f"text {row.index}: {result.failed[row]}"  # one of a request may be at fault
                events += self._finish(row.attempt_id, FinishReason.FAILED, message, now)
        for row, active in zip(plan.rows, running.members, strict=True):
            if self._is_open(active):
                events += self._complete(row, active, running, now)
        return events

    def progress(self, attempt_ids: Iterable[str], now: float) -> dict[str, RequestProgress]:
        """Return the progress of requests by id, with predictions; requests that have ended are left out."""
        return self._predictor.progress(set(attempt_ids), now)

    def snapshot(self, now: float, max_waiting: int) -> BatchSnapshot:
        """Return all batches in flight and the first `max_waiting` waiting requests, with predictions."""
        waiting = list(itertools.islice(self._table.in_order(), max_waiting))
        progress = self._predictor.waiting_progress({active.request.attempt_id for active in waiting}, now)
        return BatchSnapshot(
            tuple(
                RunningBatchSnapshot(batch.plan, batch.started_at, batch.remaining_s(now))
                for _, batch in sorted(self._predictor.running.items())
            ),
            tuple(
                WaitingRequestSnapshot(
                    active.request,
                    len(active.waiting),
                    active.arrived_at,
                    progress[active.request.attempt_id].start_in_s,
                )
                for active in waiting
            ),
            dict(self._table.waiting_by_client),
        )

    # Planning.

    def _take_turns(self, request: SchedulableRequest, arrived_at: float) -> dict[int, Turn]:
        """Return the turn of each part of a request, which has as many texts as the largest batch.

        A part, because batches of others may come between two batches, but not into one.
        """
        if not self._is_fair:
            return dict.fromkeys(range(-(-request.num_images // self.max_rows)), NO_TURN)
        tokens = sorted(request.num_tokens, reverse=True) if request.num_images > self.max_rows else request.num_tokens
        parts = [tokens[start : start + self.max_rows] for start in range(0, len(tokens), self.max_rows)]
        works_s = [self._predictor.work_s(request.batch_key, sum(part)) for part in parts]
        return self._shares.enter(request, dict(enumerate(works_s)), arrived_at)

    def _leave(self, request: SchedulableRequest, turns: Mapping[int, Turn], *, unused: bool = False) -> None:
        if self._is_fair:
            self._shares.leave(request, turns, unused=unused)

    def _rank(self, request: SchedulableRequest, arrived_at: float, turn: Turn) -> Rank:
        """Return the policy's key at time 0: no policy changes the order of two requests while they wait."""
        work_s = self._predictor.work_s(request.batch_key, sum(request.num_tokens))
        candidate = Candidate(arrived_at, request.deadline, request.priority, work_s, 0.0, turn.deadline)
        return Rank(self.policy(candidate, 0.0), turn.virtual_finish)

    def _select_leader(self, now: float) -> ActiveRequest | None:
        """Return the first request; one that cannot meet its deadline any more goes behind the others."""
        while (active := self._table.first()) is not None:
            if active.is_late or active.request.deadline is None or not uses_deadlines(self.policy):
                break
            if active.deadline - now >= COST_UNCERTAINTY * self._predictor.unloaded_s(active):
                break
            active.is_late = True
            self._table.postpone(active, INFEASIBLE_PENALTY_S)
        return active

    def _select_texts(self, leader: ActiveRequest, now: float) -> tuple[list[WaitingText], bool]:
        """Return the texts of the next batch, and whether it is full."""
        batch_key, first = leader.request.batch_key, self._table.longest(leader)
        if self._table.num_waiting == 1:  # no company: the same, sooner
            return [first], self.max_rows == 1 or 2 * first.num_tokens > self._predictor.token_limit(batch_key)
        num_waiting = len(leader.waiting) if leader.exclusive else self._table.num_waiting
        is_measured = self._predictor.batch_s(batch_key, 1) > 0.0
        judges_deadline = is_measured and not leader.is_late and uses_deadlines(self.policy)
        limits = BatchLimits(
            max_rows=min(self.max_rows, math.ceil((num_waiting + self.num_running) / self.num_sessions)),
            max_tokens=self._predictor.token_limit(batch_key),
            overhead_tokens=self._predictor.overhead_tokens(batch_key),
            batch_s=lambda tokens: self._predictor.batch_s(batch_key, tokens),
            max_s=leader.deadline - now if judges_deadline else math.inf,
            # A request of several texts ends with the last of them, so only their number a second counts.
            num_waiting=self._num_waiting_beside(leader) if len(leader.waiting) == 1 else None,
            num_sessions=self.num_sessions,
        )
        num_clients = len(self._table.waiting_by_client)
        max_of_other = max(limits.max_rows // num_clients, 1) if self._is_fair and num_clients > 1 else None
        pool_requests = _POOL_BATCHES * self.max_rows
        if batch_key.model in self.costs.packed_models:
            chosen = self._table.in_turn(leader, limits.max_rows, pool_requests, max_of_other)
            count = num_to_pack([text.num_tokens for text in chosen], limits)
            return chosen[:count], self._table.num_waiting >= self.max_rows or count < len(chosen)
        similar, position = self._table.similar(first, leader, self.max_rows, pool_requests, max_of_other)
        start, end = select_window([text.num_tokens for text in similar], position, limits)
        chosen = similar[start:end]
        length = chosen[-1].num_tokens
        for group, texts in self._table.groups.items() if not leader.exclusive else ():
            if group.batch_key == batch_key and group != leader.group and not group.exclusive_id:
                shorter = texts[: bisect_right(texts, length, key=lambda text: text.num_tokens)]
                count = num_to_fill([text.num_tokens for text in chosen], [text.num_tokens for text in shorter], limits)
                chosen = chosen + shorter[len(shorter) - count :]
        # Texts of other lengths that would fill a batch must not wait for the leader's company.
        return chosen, self._table.num_waiting >= self.max_rows or (len(chosen) + 1) * length > limits.max_tokens

    def _num_waiting_beside(self, leader: ActiveRequest) -> int:
        """Return how many texts wait; where clients share fairly, of no client more than of the leader's.

        So a lone text is not delayed for the sake of somebody else's many.
        """
        if leader.exclusive or not self._is_fair:
            return len(leader.waiting) if leader.exclusive else self._table.num_waiting
        by_client = self._table.waiting_by_client
        own = by_client[leader.request.client]
        return sum([min(num, own) for num in by_client.values()])

    def _end_of_wait(self, leader: ActiveRequest) -> float:
        """Return until when the leader can wait for company: a full batch must still meet its deadline."""
        batch_key = leader.request.batch_key
        full_batch_s = self._predictor.batch_s(batch_key, self._predictor.token_limit(batch_key))
        return min(leader.arrived_at + self.max_wait_s, leader.deadline - full_batch_s / COST_UNCERTAINTY)

    # Committing.

    def _is_open(self, active: ActiveRequest) -> bool:
        """Whether it has not ended; another request may have its id by now."""
        return self._table.requests.get(active.request.attempt_id) is active

    def _handle_oom(self, running: RunningBatch, now: float) -> list[RequestFinished]:
        """Shrink the budget and let the texts wait again; fail one that does not fit alone."""
        plan = running.plan
        self._predictor.record_oom(plan.batch_key, plan.padded_tokens)
        indices: dict[ActiveRequest, list[int]] = {}
        for row, active in zip(plan.rows, running.members, strict=True):
            if self._is_open(active):
                indices.setdefault(active, []).append(row.index)
        for active, each in indices.items():
            if len(plan.rows) > 1 or self._predictor.running:
                self._table.put_back(active, each)
                if len(plan.rows) == 1:  # it may fit without the other batches
                    self._table.make_exclusive(active)
                continue
            message = f"a text of {plan.length} tokens does not fit the device's memory, even alone"
            return self._finish(active.request.attempt_id, FinishReason.FAILED, message, now)
        return []

    def _complete(self, row: ItemId, active: ActiveRequest, running: RunningBatch, now: float) -> list[RequestFinished]:
        active.unfinished.discard(row.index)
        active.timings = RequestTimings(
            queue_s=running.started_at - active.arrived_at,
            slot_s=now - running.started_at,
            mean_batch=len(running.plan.rows),
            num_calls=1,
        )
        if active.unfinished:
            return []
        self._predictor.record_finished(active, now)
        return self._finish(row.attempt_id, FinishReason.FINISHED, "", now)

    def _finish(self, attempt_id: str, finish_reason: FinishReason, message: str, now: float) -> list[RequestFinished]:
        if attempt_id not in self._table.requests:
            return []
        num_begun = self._table.requests[attempt_id].num_begun_parts
        active, turns = self._table.remove(attempt_id), self._turns.pop(attempt_id)
        if num_begun < len(turns):
            self._leave(active.request, {part: turns.pop(part) for part in range(num_begun, len(turns))}, unused=True)
        self._leave(active.request, turns)
        timings, num_started = active.timings, 0
        if finish_reason is not FinishReason.FINISHED:
            started = [
                (batch.started_at, len(batch.plan.rows))
                for batch in self._predictor.running.values()
                for member in batch.members
                if member is active
            ]
            num_started = len(started)
            started_at, num_rows = min(started, default=(now, 0))
            timings = RequestTimings(
                started_at - active.arrived_at, now - started_at, mean_batch=num_rows, num_calls=min(num_rows, 1)
            )
        predicted_s = active.predicted_s
        return [RequestFinished(attempt_id, finish_reason, message, timings, num_started, None, now, predicted_s)]
