"""Whose job is claimed next: API keys take turns. Pure.

A key with fewer running jobs comes first; of several, the one whose last turn is the longest ago. So a key with a
thousand queued jobs delays the only one of another key by the jobs that run, not by those that wait.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple


class QueuedJob(NamedTuple):
    """A claimable job. Jobs of one key are claimed in order of `order_at`, then of `seq`."""

    order_at: float
    seq: int
    id: str
    made_by: str
    status: str
    attempt: int
    num_losses: int


class Turns:
    """The turns that one process has given to keys."""

    def __init__(self) -> None:
        self._last_turn: Counter[str] = Counter()  # by key
        self._num_turns = 0

    def take(self, queued: Iterable[QueuedJob], num_running: Mapping[str, int], limit: int) -> list[QueuedJob]:
        """The next `limit` jobs, in order. `num_running` is by key, the empty one included."""
        queues: dict[str, list[QueuedJob]] = {}
        for job in sorted(queued, reverse=True):  # the next one is the last
            queues.setdefault(job.made_by, []).append(job)
        running = Counter(num_running)
        taken: list[QueuedJob] = []
        while queues and len(taken) < limit:
            key = min(queues, key=lambda key: (running[key], self._last_turn[key], queues[key][-1]))
            taken.append(queues[key].pop())
            running[key] += 1
            self._num_turns += 1
            self._last_turn[key] = self._num_turns
            if not queues[key]:
                del queues[key]
        return taken
