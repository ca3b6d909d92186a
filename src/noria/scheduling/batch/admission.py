"""Decides whether a new request is accepted: by the queue's length, the work in it, and all deadlines."""

import math
from collections.abc import Collection
from dataclasses import dataclass

from noria.scheduling.batch.predictor import FinishPredictor
from noria.scheduling.batch.text_table import ActiveRequest, Rank, TextTable
from noria.scheduling.policies import COST_UNCERTAINTY
from noria.scheduling.shares.fair_shares import FairShares
from noria.scheduling.shares.queue_limits import Queued, reject_for_backlog, reject_for_length
from noria.scheduling.types import FinishReason, RequestFinished, SchedulableRequest

_ROUNDING_S = 1e-6  # larger than rounding errors of predictions


@dataclass(slots=True)
class AdmissionControl:
    """Adds accepted requests to `table`; `predictor` predicts on the same table."""

    table: TextTable
    predictor: FinishPredictor
    queue_limit: int  # texts that may wait, as `queue_limits.py` has it
    queue_limit_s: float  # seconds of work that may be accepted while a text waits, likewise
    shares: FairShares | None  # None: clients do not share the device

    def admit(
        self, request: SchedulableRequest, arrived_at: float, ranks: tuple[Rank, ...], part_texts: int, now: float
    ) -> RequestFinished | None:
        """Add `request` to the table and return None, or return its rejection, without `finished_at` and `timings`.

        `ranks` and `part_texts` are as of `TextTable.add`.
        """
        active = self.table.add(request, arrived_at, ranks, part_texts)
        late = self.deadlines_broken_by(active, now)
        if (
            active.request.deadline is not None
            and (rejection := self._reject_for_deadline(active, late, now)) is not None
        ):
            self.table.remove(request.attempt_id)
            return rejection
        if late:  # it has no deadline: it can wait for theirs
            self.table.postpone(active, max(each.rank.key for each in late) + _ROUNDING_S - active.rank.key)
        self.predictor.record_promise(active, now)
        return None

    def reject_for_queue(self, request: SchedulableRequest) -> RequestFinished | None:
        """Return a rejection if the queue is full; an empty one takes any request. Call it before `admit`."""
        num_waiting = self.table.num_waiting
        if not num_waiting:
            return None
        share = 1.0 if self.shares is None else self.shares.share_of(request)
        own, backlog_s = self.table.waiting_by_client[request.client], self.predictor.backlog_s
        queued = Queued(num_waiting, own, request.num_images, self.queue_limit, share)
        rejection = reject_for_length(request.attempt_id, "texts", queued, backlog_s, num_waiting)
        if rejection is not None or math.isinf(self.queue_limit_s):
            return rejection
        own_s = self.predictor.waiting_s_of(request.client)
        added_s = self.predictor.work_s(request.batch_key, sum(request.num_tokens))
        return reject_for_backlog(request.attempt_id, Queued(backlog_s, own_s, added_s, self.queue_limit_s, share))

    def _reject_for_deadline(
        self, active: ActiveRequest, late: Collection[ActiveRequest], now: float
    ) -> RequestFinished | None:
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
        behind = {}
        for each in self.table.behind(newcomer):
            if each.request.deadline is not None:
                behind[each.request.attempt_id] = each
        if not behind:
            return []
        delay_s = self.predictor.work_s(newcomer.request.batch_key, newcomer.waiting_tokens)
        return [
            behind[attempt_id]
            for attempt_id, progress in self.predictor.waiting_progress(behind, now).items()
            if progress.finish_in_s > (remaining_s := behind[attempt_id].deadline - now)
            and COST_UNCERTAINTY * (progress.finish_in_s - delay_s) <= remaining_s
        ]
