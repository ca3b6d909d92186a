"""Selects the rows of one batch: a window of lengths around the leader, at the least cost per real token.

A call computes its rows padded to the longest, so rows of similar length waste little. Among waiting rows sorted by
length, every window that contains the leader, fits the limits and is worth the leader's delay is a candidate; the one
with the least seconds per real token wins. A window is worth the delay if the device time that it saves lets those who
wait start earlier, together, by more than it lets the leader end later: with few waiting rows a batch is small and
latency is low, with many it is efficient. For log-normal lengths that spends 80 to 89 % of the device's time on real
tokens, growing with the number of waiting rows, where taking the first eight spends 18 to 37 %
(`python -m noria_bench.micro.batch_scheduling`).
"""

import math
from collections.abc import Callable, Sequence

from msgspec import Struct


class BatchLimits(Struct, frozen=True):
    """The limits of one batch. A leader alone is allowed, whatever it takes."""

    max_rows: int
    max_tokens: int  # padding included
    overhead_tokens: float  # the duration of a call beside that of its tokens, in tokens
    batch_s: Callable[[int], float]  # duration of a call by its tokens, padding included
    max_s: float = math.inf  # duration that the leader's deadline allows
    num_waiting: int | None = None  # rows that wait, those of the batch included; None: the leader may be delayed
    num_sessions: int = 1  # which share the work

    def allow(self, num_rows: int, num_tokens: int) -> bool:
        """Whether a batch may have `num_rows` rows of `num_tokens` tokens in all, padding included."""
        if num_rows > self.max_rows or num_tokens > self.max_tokens:
            return False
        return math.isinf(self.max_s) or self.batch_s(num_tokens) <= self.max_s

    def cost(self, num_tokens: int, num_calls: int = 1) -> float:
        """Duration of calls of `num_tokens` in all, padding included; in tokens."""
        return num_calls * self.overhead_tokens + num_tokens

    def is_worth_delay(self, num_rows: int, cost: float, alone_cost: float, leader_cost: float) -> bool:
        """Whether a batch of `cost`, whose rows take `alone_cost` one by one, may delay a leader of `leader_cost`."""
        if self.num_waiting is None:
            return True
        num_others = max(self.num_waiting - num_rows, 0)
        return num_others * (alone_cost - cost) / self.num_sessions >= cost - leader_cost


def select_window(lengths: Sequence[int], leader: int, limits: BatchLimits) -> tuple[int, int]:
    """Select from `lengths`, sorted, a window that contains index `leader`; return its first index and its end."""
    leader_cost = limits.cost(lengths[leader])
    best, best_cost = (leader, leader + 1), math.inf
    for last in range(leader, len(lengths)):
        length, num_real = lengths[last], sum(lengths[leader + 1 : last + 1])
        for first in range(leader, -1, -1):
            num_real += lengths[first]
            num_rows = last - first + 1
            if not limits.allow(num_rows, num_rows * length):
                break
            cost = limits.cost(num_rows * length)
            if cost / num_real < best_cost and limits.is_worth_delay(
                num_rows, cost, limits.cost(num_real, num_rows), leader_cost
            ):
                best, best_cost = (first, last + 1), cost / num_real
    return best


def num_to_pack(lengths: Sequence[int], limits: BatchLimits) -> int:
    """Return how many rows of `lengths`, in the policy's order, share a call that has no padding.

    Each more lowers the cost per token, so it is the most that fit and are worth the leader's delay.
    """
    leader_cost, num_tokens, best = limits.cost(lengths[0]), 0, 1
    for num_rows, length in enumerate(lengths, start=1):
        num_tokens += length
        if num_rows > 1 and not limits.allow(num_rows, num_tokens):
            break
        if limits.is_worth_delay(num_rows, limits.cost(num_tokens), limits.cost(num_tokens, num_rows), leader_cost):
            best = num_rows
    return best


def num_to_fill(chosen: Sequence[int], shorter: Sequence[int], limits: BatchLimits) -> int:
    """Return how many of the last of `shorter` may join `chosen`, if each must lower the cost per real token.

    `shorter` are sorted lengths, none greater than the greatest of `chosen`: the batch becomes no longer.
    """
    length, num_real = max(chosen), sum(chosen)
    for count in range(len(shorter)):
        num_rows, added = len(chosen) + count, shorter[-1 - count]
        num_tokens = (num_rows + 1) * length
        cost, larger_cost = limits.cost(num_rows * length), limits.cost(num_tokens)
        if not limits.allow(num_rows + 1, num_tokens) or larger_cost * num_real >= cost * (num_real + added):
            return count
        num_real += added
    return len(shorter)
