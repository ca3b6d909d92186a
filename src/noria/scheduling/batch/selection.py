"""Selects the rows of one batch: a window of lengths around the leader, at the least cost per real token.

A call computes its rows padded to the longest, so rows of similar length waste little. Among waiting rows sorted by
length, every window that contains the leader and fits the limits is a candidate; the one with the least seconds per
real token wins. For log-normal lengths that spends 78 to 93 % of the device's time on real tokens, growing with the
number of waiting rows, where taking the first eight spends 18 to 37 %
(`python -m noria_bench.micro.batch_scheduling`).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What one batch may use. A leader alone is allowed, whatever it takes."""

    max_rows: int
    max_tokens: int  # padding included
    batch_s: Callable[[int], float]  # duration of a call by its tokens, padding included
    max_s: float = math.inf  # duration that the leader's deadline allows

    def allow(self, num_rows: int, length: int) -> bool:
        """Whether a batch may have `num_rows` rows of `length` tokens, padding included."""
        if num_rows > self.max_rows or num_rows * length > self.max_tokens:
            return False
        return math.isinf(self.max_s) or self.batch_s(num_rows * length) <= self.max_s


def select_window(lengths: Sequence[int], leader: int, limits: BatchLimits) -> tuple[int, int]:
    """Select from `lengths`, sorted, a window that contains index `leader`; return its first index and its end."""
    best, best_cost = (leader, leader + 1), limits.batch_s(lengths[leader]) / lengths[leader]
    for last in range(leader, min(len(lengths), leader + limits.max_rows)):
        length = lengths[last]
        if not limits.allow(last - leader + 1, length):
            break  # so does any longer one
        num_real = sum(lengths[leader : last + 1])
        for first in range(leader, max(last - limits.max_rows, -1), -1):
            if first < leader:
                num_real += lengths[first]
            num_rows = last - first + 1
            if num_rows > 1 and not limits.allow(num_rows, length):
                break
            cost = limits.batch_s(num_rows * length) / num_real
            if cost < best_cost:
                best, best_cost = (first, last + 1), cost
    return best


def num_to_fill(chosen: Sequence[int], shorter: Sequence[int], limits: BatchLimits) -> int:
    """Return how many of the last of `shorter` may join `chosen`, if each must lower the cost per real token.

    `shorter` are sorted lengths, none greater than the greatest of `chosen`: the batch becomes no longer.
    """
    length, num_real = max(chosen), sum(chosen)
    for count in range(len(shorter)):
        num_rows, added = len(chosen) + count, shorter[-1 - count]
        cost, larger_cost = limits.batch_s(num_rows * length), limits.batch_s((num_rows + 1) * length)
        if not limits.allow(num_rows + 1, length) or larger_cost * num_real >= cost * (num_real + added):
            return count
        num_real += added
    return len(shorter)
