"""The loop of batches that sessions execute side by side: plan all that can start, and commit what a session finished.

A batch finishes in a thread of the executor, which passes it to `on_done`; whoever drives the loop calls `finish` with
it. Any thread may drive the loop, one at a time.
"""

import heapq
import math
from collections.abc import Callable, Mapping
from typing import Generic

from msgspec import Struct

from noria.engine.loop import Client, EngineEvent, RequestLoop, client_of
from noria.engine.runtime import BatchExecutor, FinishedBatch, RequestT
from noria.protocol.model_spec import ModelKey
from noria.scheduling.interface import BatchwiseScheduler
from noria.scheduling.types import BatchPlan, SchedulableRequest


class ExecutedBatch(Struct, Generic[RequestT], frozen=True):
    """A batch after its commit, for metrics and live views."""

    batch: FinishedBatch
    requests: tuple[RequestT | None, ...]  # the request of each row; None: it had ended before the batch did
    tokens_by_client: Mapping[Client, int]  # tokens of requests that had not ended, without padding


class BatchLoop(RequestLoop[RequestT]):
    """Runs one scheduler of texts and the sessions of one executor."""

    scheduler: BatchwiseScheduler
    _executor: BatchExecutor[RequestT]

    def __init__(
        self,
        scheduler: BatchwiseScheduler,
        executor: BatchExecutor[RequestT],
        on_event: Callable[[EngineEvent[RequestT]], None],
        clock: Callable[[], float],
        on_plan: Callable[[BatchPlan], None],
        on_done: Callable[[FinishedBatch], None],
    ) -> None:
        """`on_plan` is called with each plan before it is executed, `on_done` by any thread when it was."""
        super().__init__(scheduler, executor, on_event, clock)
        self._on_plan, self._on_done = on_plan, on_done
        self._running: dict[int, ModelKey] = {}  # the model of each batch in flight, by session
        self._expiries: list[tuple[float, str]] = []  # a heap; those of requests that have ended leave it at its top

    def start_batches(self) -> None:
        """End the requests whose time has passed, and start every batch that can start now."""
        now = self._clock()
        if self._next_expiry() <= now:
            self._end_requests(self.scheduler.expire(now))
        while (plan := self.scheduler.plan(now)) is not None:
            self._on_plan(plan)
            self._running[plan.session] = plan.batch_key.model
            self._executor.start(plan, self._on_done)
        self._report_streaming(now)

    def finish(self, batch: FinishedBatch) -> ExecutedBatch[RequestT]:
        """Commit a batch that `on_done` was called with."""
        del self._running[batch.plan.session]
        requests = tuple([self._requests.get(row.attempt_id) for row in batch.plan.rows])
        tokens: dict[Client, int] = {}
        for prepared, num_tokens in zip(requests, batch.plan.num_tokens, strict=True):
            if prepared is not None:
                client = client_of(prepared)
                tokens[client] = tokens.get(client, 0) + num_tokens
        self._end_requests(self.scheduler.commit(batch.plan, batch.result, self._clock(), batch.seconds))
        return ExecutedBatch(batch, requests, tokens)

    def uses(self, model: ModelKey) -> bool:
        """Whether a request of this model has not ended, or a batch of it is in flight."""
        return super().uses(model) or model in self._running.values()

    def wait_s(self, now: float) -> float | None:
        """Return for how long `start_batches` has nothing to do unless something else happens; None: for ever."""
        wait_ends_at, due = self.scheduler.next_deadline(), self._next_expiry()
        due = due if wait_ends_at is None else min(due, wait_ends_at)
        return None if due == math.inf else max(due - now, 0.0)

    def _next_expiry(self) -> float:
        while self._expiries and self._expiries[0][1] not in self._requests:
            heapq.heappop(self._expiries)
        return self._expiries[0][0] if self._expiries else math.inf

    def _on_accepted(self, schedulable: SchedulableRequest, now: float) -> None:
        """Keep when it expires; report its progress only if it streams it."""
        attempt_id = schedulable.attempt_id
        if schedulable.expires_at is not None:
            heapq.heappush(self._expiries, (schedulable.expires_at, attempt_id))
        if self._requests[attempt_id].request.stream_progress:
            super()._on_accepted(schedulable, now)
