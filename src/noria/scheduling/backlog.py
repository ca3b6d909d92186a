"""Rejects requests for the work that is queued; the same for images and for texts."""

from noria.scheduling.types import FinishReason, RequestFinished


def reject_for_backlog(attempt_id: str, backlog_s: float, added_s: float, limit_s: float) -> RequestFinished | None:
    """Return the rejection of a request that adds `added_s` to `backlog_s` if that is more than `limit_s`."""
    excess_s = backlog_s + added_s - limit_s
    if excess_s <= 0.0:
        return None
    message = (
        f"the queue is full: it holds {backlog_s:.2f} s of work, the limit is {limit_s:g} s, "
        f"and this request takes {added_s:.2f} s"
    )
    wait_s = min(excess_s, backlog_s)  # until it fits, or until the queue is empty
    return RequestFinished(attempt_id, FinishReason.REJECTED, message, retry_after_s=wait_s)
