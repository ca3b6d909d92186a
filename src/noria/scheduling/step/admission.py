"""Decides whether a new request is accepted: by the queue's length, the work in it, and all deadlines.

Deadlines are judged by predictions without the learned correction: requests without a deadline finish late because
deadlines of others are met, and these delays must not make further deadlines look unmeetable.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass

from noria.scheduling.policies import COST_UNCERTAINTY, shares_fairly
from noria.scheduling.shares.queue_limits import Queued, reject_for_backlog, reject_for_length
from noria.scheduling.step.active_request import ActiveRequest
from noria.scheduling.step.predictor import CompletionPredictor
from noria.scheduling.step.request_table import RequestTable, count_rows
from noria.scheduling.types import FinishReason, RequestFinished, SchedulableRequest

_ROUNDING_S = 1e-6  # larger than rounding errors of predictions


@dataclass(slots=True)
class AdmissionControl:
    """Adds accepted requests to `table`; `predictor` predicts on the same table."""

    table: RequestTable
    predictor: CompletionPredictor
    queue_limit: int  # images that may wait beyond the free slots, as `queue_limits.py` has it
    queue_limit_s: float  # seconds of work that may be queued ahead of a request that has to wait, likewise

    def admit(self, request: SchedulableRequest, arrived_at: float, now: float) -> RequestFinished | None:
        """Add `request` to the table and return None, or return its rejection, without `finished_at` and `timings`.

        One that another engine has handed over was accepted there, however long the queue is here.
        """
        rejection = None
        if request.resumed is None:
            rejection = self.reject_for_queue_length(request) or self.reject_for_backlog(request)
        if rejection is not None:
            return rejection
        active = self.table.add(request, arrived_at)
        self.predictor.take_turns(active)
        late_ids = self.deadlines_broken_by(active, now)
        if (rejection := self.reject_for_deadline(request, late_ids, now)) is not None:
            self.table.remove(request.attempt_id)
            return rejection
        if late_ids:
            self.deprioritize(active, late_ids, now)  # it has no deadline: it can wait for theirs
        active.promised_forecast = self.predictor.predict_uncorrected(request.attempt_id, now)
        return None

    def reject_for_queue_length(self, request: SchedulableRequest) -> RequestFinished | None:
        """Return a rejection if more images would wait beyond the free slots than `queue_limit` allows, else None."""
        num_waiting, num_running = self.table.num_waiting, len(self.table.running)
        own = self.table.waiting_by_client[request.client]
        queued = Queued(num_waiting, own, request.num_images, self.queue_limit, self._share_of(request))
        if not queued.excess:
            return None
        num_free = max(self.predictor.max_running - num_running, 0)
        return reject_for_length(
            request.attempt_id, "images", queued, self.predictor.backlog_s, num_waiting + num_running, num_free
        )

    def reject_for_backlog(self, request: SchedulableRequest) -> RequestFinished | None:
        """Return a rejection if more work would be queued than `queue_limit_s` allows, else None.

        A request that steps at once is taken, and any by an idle engine. Others wait, with a slot or without.
        """
        if math.isinf(self.queue_limit_s) or not self.table.requests or self._steps_at_once(request):
            return None
        added_s, own_s = self.predictor.device_time_s(request), self.predictor.backlog_of(request.client)
        queued = Queued(self.predictor.backlog_s, own_s, added_s, self.queue_limit_s, self._share_of(request))
        return reject_for_backlog(request.attempt_id, queued)

    def _steps_at_once(self, request: SchedulableRequest) -> bool:
        """Whether nothing waits and one call computes the running images and those of `request`, as far as they pay."""
        rows = count_rows(self.table.running.values()) + request.num_images * request.rows
        return not self.table.num_waiting and rows <= self.predictor.costs.rows_limit(request.batch_key)

    def _share_of(self, request: SchedulableRequest) -> float:
        return self.table.shares.share_of(request) if shares_fairly(self.predictor.policy) else 1.0

    def reject_for_deadline(
        self, request: SchedulableRequest, late_ids: Collection[str], now: float
    ) -> RequestFinished | None:
        """Return a rejection if `request` would miss its deadline, or meet it only by breaking those of `late_ids`.

        The request must be in the table.
        """
        if request.deadline is None:
            return None
        remaining_s = request.deadline - now
        finish_s = self.predictor.predict_uncorrected(request.attempt_id, now).finish_in_s
        if finish_s > remaining_s:
            unloaded_s = self.predictor.unloaded_s(request)
            message = f"it would finish in {finish_s:.2f} s, its deadline is in {max(remaining_s, 0.0):.2f} s"
            if unloaded_s > remaining_s:
                message += f"; even on an idle server it takes {unloaded_s:.2f} s"
                return RequestFinished(request.attempt_id, FinishReason.UNMEETABLE, message)
            return RequestFinished(
                request.attempt_id, FinishReason.UNMEETABLE, message, retry_after_s=finish_s - remaining_s
            )
        if late_ids:
            message = "it could finish by its deadline only if a request accepted before missed its own"
            wait_s = max(self._time_to_deadline_s(attempt_id, now) for attempt_id in late_ids)
            return RequestFinished(request.attempt_id, FinishReason.UNMEETABLE, message, retry_after_s=wait_s)
        return None

    def deadlines_broken_by(self, newcomer: ActiveRequest, now: float) -> list[str]:
        """Return the requests that miss their deadlines only because of `newcomer`, the last one added.

        A deadline missed without `newcomer` by no more than the uncertainty of costs counts as met without it.
        """
        late = self.predictor.predict_late(newcomer, now)
        if not late:
            return []
        forecasts = self.predictor.predict_without(newcomer, late, now)
        return [
            attempt_id
            for attempt_id, with_newcomer in late.items()
            if (without_s := forecasts[attempt_id].finish_in_s) + _ROUNDING_S < with_newcomer.finish_in_s
            and COST_UNCERTAINTY * without_s <= self._time_to_deadline_s(attempt_id, now)
        ]

    def deprioritize(self, newcomer: ActiveRequest, late_ids: Collection[str], now: float) -> None:
        """Rank `newcomer` behind the requests whose deadlines it would break."""
        late = [self.table.requests[attempt_id] for attempt_id in late_ids]
        last = max(
            self.predictor.policy_key(active, self.table.next_call(image), now, image.index)
            for active in late
            for image in active.images
        )
        own = min(self.predictor.waiting_key(newcomer, index, now) for index in newcomer.waiting)
        newcomer.priority_penalty = max(last + _ROUNDING_S - own, 0.0)
        self.predictor.rank_again(newcomer)

    def _time_to_deadline_s(self, attempt_id: str, now: float) -> float:
        deadline = self.table.requests[attempt_id].request.deadline
        return math.inf if deadline is None else deadline - now
