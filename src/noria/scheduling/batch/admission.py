"""Decides whether a new request is accepted: by the queue's length, the work in it, and all deadlines."""

import math
from collections.abc import Collection
from dataclasses import dataclass

from noria.scheduling.backlog import reject_for_backlog
from noria.scheduling.batch.predictor import FinishPredictor
from noria.scheduling.batch.text_table import ActiveRequest, TextTable
from noria.scheduling.policies import COST_UNCERTAINTY
from noria.scheduling.types import FinishReason, RequestFinished, SchedulableRequest

_ROUNDING_S = 1e-6  # larger than rounding errors of predictions


@dataclass(slots=True)
class AdmissionControl:
    """Adds accepted requests to `table`; `predictor` predicts on the same table."""

    table: TextTable
    predictor: FinishPredictor
    queue_limit: int  # texts that may wait
    queue_limit_s: float  # seconds of work that may be accepted while a text waits

    def admit(self, request: SchedulableRequest, arrived_at: float, rank: float, now: float) -> RequestFinished | None:
        """Add `request` to the table and return None, or return its rejection, without `finished_at` and `timings`."""
        rejection = self._reject_for_queue_length(request) or self._reject_for_backlog(request)
        if rejection is not None:
            return rejection
        active = self.table.add(request, arrived_at, rank)
        late = self.deadlines_broken_by(active, now)
        if (rejection := self._reject_for_deadline(active, late, now)) is not None:
            self.table.remove(request.attempt_id)
            return rejection
        if late:  # it has no deadline: it can wait for theirs
            self.table.change_rank(active, max(each.rank for each in late) + _ROUNDING_S)
        self.predictor.record_promise(active, now)
        return None

    def _reject_for_queue_length(self, request: SchedulableRequest) -> RequestFinished | None:
        """An empty queue takes any request."""
        num_waiting = self.table.num_waiting
        num_excess = num_waiting + request.num_images - self.queue_limit
        if not num_waiting or num_excess <= 0:
            return None
        message = (
            f"the queue is full: {num_waiting} texts are waiting, the limit is {self.queue_limit}, "
            f"and this request has {request.num_images}"
        )
        wait_s = self.predictor.backlog_s * min(num_excess / num_waiting, 1.0)  # until so many have left
        return RequestFinished(request.attempt_id, FinishReason.REJECTED, message, retry_after_s=wait_s)

    def _reject_for_backlog(self, request: SchedulableRequest) -> RequestFinished | None:
        """An empty queue takes any request."""
        if not self.table.num_waiting or math.isinf(self.queue_limit_s):
            return None
        added_s = self.predictor.work_s(request.batch_key, sum(request.num_tokens))
        return reject_for_backlog(request.attempt_id, self.predictor.backlog_s, added_s, self.queue_limit_s)

    def _reject_for_deadline(
        self, active: ActiveRequest, late: Collection[ActiveRequest], now: float
    ) -> RequestFinished | None:
        if active.request.deadline is None:
            return None
        attempt_id, remaining_s = active.request.attempt_id, active.deadline - now
        finish_s = self.predictor.waiting_progress([attempt_id], now)[attempt_id].finish_in_s
        if finish_s > remaining_s:
            unloaded_s = self.predictor.unloaded_s(active)
            message = f"it would finish in {finish_s:.3f} s, its deadline is in {max(remaining_s, 0.0):.3f} s"
            if unloaded_s > remaining_s:
                message += f"; even on an idle server it takes {unloaded_s:.3f} s"
                return RequestFinished(attempt_id, FinishReason.UNMEETABLE, message)
            return RequestFinished(attempt_id, FinishReason.UNMEETABLE, message, retry_after_s=finish_s - remaining_s)
        if late:
            message = "it could finish by its deadline only if a request accepted before missed its own"
            wait_s = max(each.deadline for each in late) - now
            return RequestFinished(attempt_id, FinishReason.UNMEETABLE, message, retry_after_s=wait_s)
        return None

    def deadlines_broken_by(self, newcomer: ActiveRequest, now: float) -> list[ActiveRequest]:
        """Return the requests that miss their deadlines only because of `newcomer`, which is in the table.

        A deadline missed without `newcomer` by no more than the uncertainty of costs counts as met without it.
        """
        behind = {
            each.request.attempt_id: each for each in self.table.behind(newcomer) if each.request.deadline is not None
        }
        if not behind:
            return []
        delay_s = self.predictor.work_s(newcomer.request.batch_key, newcomer.waiting_tokens)
        return [
            behind[attempt_id]
            for attempt_id, progress in self.predictor.waiting_progress(behind, now).items()
            if progress.finish_in_s > (remaining_s := behind[attempt_id].deadline - now)
            and COST_UNCERTAINTY * (progress.finish_in_s - delay_s) <= remaining_s
        ]
