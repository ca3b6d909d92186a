"""Live views of an engine whose sessions execute batches side by side. A slot is a row of a session's batch."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from noria.engine.live.pending_view import TimedIteration
from noria.engine.live.publisher import LiveViewPublisher, SubscriberT
from noria.engine.loop import ExecutedBatch
from noria.engine.runtime import PreparedRequest
from noria.errors import GenerationFailed
from noria.protocol.live_views import BatchView, DepartureView, IterationView, SlotView
from noria.scheduling.interface import BatchwiseScheduler
from noria.scheduling.types import RunningBatchSnapshot


class BatchLiveView(LiveViewPublisher[SubscriberT]):
    """Publishes the views of one engine to its subscribers."""

    def __init__(
        self,
        incarnation: str,
        scheduler: BatchwiseScheduler,
        num_sessions: int,
        find_request: Callable[[str], PreparedRequest],
        now: float,
    ) -> None:
        super().__init__(incarnation, scheduler, find_request, now)
        self._num_sessions, self._max_rows = num_sessions, scheduler.num_slots // num_sessions

    def on_batch(self, executed: ExecutedBatch[Any], now: float, at: float) -> None:
        """Record an executed batch, after its events."""
        batch, plan = executed.batch, executed.batch.plan
        num_rows = len(plan.rows) if batch.result.fits else 0
        self._last_iteration, self._version = self._last_iteration + 1, self._version + 1
        # The sessions together have as many seconds as the clock, and as many slots as the scheduler.
        self._stats.add_iteration(
            batch.seconds / self._num_sessions, num_rows * self._num_sessions, num_rows, executed.tokens_by_client, now
        )
        self._stats.add_image(now, num_rows - len(batch.result.failed))
        view = IterationView(
            number=self._last_iteration,
            started_at=at - batch.seconds,
            duration_s=batch.seconds,
            text_encode_s=0.0,
            decode_s=0.0,
            num_joined=num_rows,
            num_stepped=num_rows,
            num_decoded=num_rows,
            batch=BatchView(plan.session, plan.batch_key.model.name, sum(plan.num_tokens), plan.padded_tokens),
        )
        self._iterations.append(TimedIteration(view, None))
        if self._subscribers:
            departures = list(self._departures_of(executed))
            self._departures.extend(departures)
            self._num_departures += len(departures)

    def _departures_of(self, executed: ExecutedBatch[Any]) -> Iterator[DepartureView]:
        plan, result = executed.batch.plan, executed.batch.result
        for number, (row, prepared) in enumerate(zip(plan.rows, executed.requests, strict=True)):
            if prepared is not None:
                outcome = GenerationFailed.code if row in result.failed else "ok"
                slot, request = plan.session * self._max_rows + number, prepared.request
                iteration = self._last_iteration
                yield DepartureView(iteration, slot, request.request_id, row.index, outcome, request.client)

    def _slot_views(self, running: Sequence[RunningBatchSnapshot], now: float, at: float) -> tuple[SlotView, ...]:
        return tuple(view for batch in running for view in self._row_views(batch, now, at))

    def _row_views(self, batch: RunningBatchSnapshot, now: float, at: float) -> Iterator[SlotView]:
        """The rows of requests that have not ended."""
        for number, row in enumerate(batch.plan.rows):
            try:
                prepared = self._find_request(row.attempt_id)
            except KeyError:
                continue
            request = prepared.request
            yield SlotView(
                slot=batch.plan.session * self._max_rows + number,
                request_id=request.request_id,
                index=row.index,
                model=request.model,
                settings=prepared.settings_view,
                call=0,
                num_calls=prepared.num_calls,
                priority=request.priority,
                joined_at=at + batch.started_at - now,
                deadline_at=None,
                finish_at=at + batch.finish_in_s,
                client=request.client,
                share_client=request.share_client,
            )
