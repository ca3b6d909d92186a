"""Limits of a queue, of images or texts and of seconds of work; the clients that have work share them by weight.

While there is room, a request is accepted whosever it is. A full queue still accepts what its client's share of the
limit has room for: so who fills it is refused, and who has little in it is not. What is left over of others stays, so
all together can have more than the limit: with equal weights and n clients, at most 1 + 1/2 + … + 1/n times as much.
"""

from typing import NamedTuple

from noria.scheduling.types import FinishReason, RequestFinished


class Queued(NamedTuple):
    """The length of a queue, in images or texts or in seconds of work, and what a new request adds."""

    total: float
    own: float  # the part of the client of a new request
    added: float  # by that request
    limit: float
    share: float  # the client's share of the limit; 1: it is alone, or clients do not count

    @property
    def has_others(self) -> bool:
        """Whether other clients have shares, too."""
        return self.share < 1.0

    @property
    def excess(self) -> float:
        """By how much the limit is exceeded with the request; 0: it is accepted."""
        if self.has_others and self.own + self.added <= self.share * self.limit:
            return 0.0
        return max(self.total + self.added - self.limit, 0.0)

    def of_client(self, text: str) -> str:
        """Return the part of a message that is about the client, if there are others; `text` formats a number."""
        if not self.has_others:
            return ""
        own, limit = text.format(self.own), text.format(self.share * self.limit)
        return f"; this client has {own} of it, and its share of the limit is {limit}"


def reject_for_length(
    attempt_id: str, items: str, queued: Queued, backlog_s: float, num_open: int, num_free: int = 0
) -> RequestFinished | None:
    """Return the rejection of a request with too many `items` ("images", "texts"); None if it is accepted.

    `num_free` are beyond the limit. The `num_open` items that wait or run take `backlog_s`.
    """
    excess = queued.excess - num_free
    if excess <= 0:
        return None
    message = (
        f"the queue is full: {queued.total} {items} are waiting, the limit is {queued.limit}, "
        f"and this request has {queued.added}{queued.of_client('{:.0f}')}"
    )
    wait_s = backlog_s * min(excess / max(num_open, 1), 1.0)  # until so many have left
    return RequestFinished(attempt_id, FinishReason.REJECTED, message, retry_after_s=wait_s)


def reject_for_backlog(attempt_id: str, queued: Queued) -> RequestFinished | None:
    """Return the rejection of a request that adds too much work; None if it is accepted."""
    if not queued.excess:
        return None
    message = (
        f"the queue is full: it holds {queued.total:.2f} s of work, the limit is {queued.limit:g} s, "
        f"and this request takes {queued.added:.2f} s{queued.of_client('{:.2f} s')}"
    )
    wait_s = min(queued.excess, queued.total)  # until it fits, or until the queue is empty
    return RequestFinished(attempt_id, FinishReason.REJECTED, message, retry_after_s=wait_s)
