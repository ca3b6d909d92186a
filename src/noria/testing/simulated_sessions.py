"""Text encoders in virtual time: sessions that execute batches side by side, and users that send texts to them."""

import heapq
import itertools
import math
import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from noria.scheduling.batch.scheduler import BatchScheduler
from noria.scheduling.types import (
    BatchKey,
    BatchPlan,
    BatchResult,
    FinishReason,
    ItemId,
    RequestFinished,
    SchedulableRequest,
)

TEXT_KEY = BatchKey(0, 0)


class BatchPlanner(Protocol):
    """The part of a batch scheduler that a simulation uses."""

    def submit(self, request: SchedulableRequest, now: float) -> list[RequestFinished]: ...  # noqa: D102
    def plan(self, now: float) -> BatchPlan | None: ...  # noqa: D102
    def commit(  # noqa: D102
        self, plan: BatchPlan, result: BatchResult, now: float, seconds: float
    ) -> list[RequestFinished]: ...


class Simulated(NamedTuple):
    """The measurements of a simulation."""

    useful_share: float  # part of the sessions' time: what the tokens alone, without padding and overhead, would take
    latencies_s: list[float]  # sorted

    @property
    def p99_s(self) -> float:
        """The 99th percentile of the latencies."""
        return self.latencies_s[int(0.99 * len(self.latencies_s))]


def log_normal_length(rng: random.Random) -> int:
    """Draw the length of a text: median 32 tokens, cut to 4–256."""
    return max(4, min(256, round(32 * math.exp(rng.gauss(0.0, 0.9)))))


def text_request(
    attempt_id: str, *num_tokens: int, expires_at: float | None = None, **more: object
) -> SchedulableRequest:
    """Make a request of texts with so many tokens."""
    return SchedulableRequest(attempt_id, TEXT_KEY, len(num_tokens), 1, expires_at, num_tokens=num_tokens, **more)  # type: ignore[arg-type]


def run_closed_loop(
    scheduler: BatchPlanner,
    num_users: int,
    num_requests: int,
    batch_s: Callable[[int], float],
    token_s: float,
    num_sessions: int = 2,
    on_submit: Callable[[str, float], None] = lambda _id, _now: None,
    on_end: Callable[[str, float], None] = lambda _id, _now: None,
) -> Simulated:
    """Let each user send one text, the next when it is answered. `batch_s`: duration of a call by its padded tokens."""
    rng, numbers = random.Random(1), itertools.count()  # noqa: S311 - traffic needs no secrets
    sent_at: dict[str, float] = {}
    ends: list[tuple[float, int, BatchPlan, float]] = []
    latencies_s: list[float] = []
    num_tokens, now = 0, 0.0

    def send() -> None:
        attempt_id = f"r{next(numbers)}"
        sent_at[attempt_id] = now
        assert not scheduler.submit(text_request(attempt_id, log_normal_length(rng)), now)
        on_submit(attempt_id, now)

    for _ in range(num_users):
        send()
    while len(latencies_s) < num_requests:
        while (plan := scheduler.plan(now)) is not None:
            seconds = batch_s(plan.padded_tokens)
            heapq.heappush(ends, (now + seconds, next(numbers), plan, seconds))
        now, _, plan, seconds = heapq.heappop(ends)
        num_tokens += sum(plan.num_tokens)
        for event in scheduler.commit(plan, BatchResult(), now, seconds):
            latencies_s.append(now - sent_at.pop(event.attempt_id))
            on_end(event.attempt_id, now)
            send()
    return Simulated(num_tokens * token_s / (num_sessions * now), sorted(latencies_s))


def run_open_loop(
    scheduler: BatchScheduler,
    texts_per_s: float,
    num_requests: int,
    batch_s: Callable[[int], float],
    deadlines_s: Sequence[float],
) -> Counter[str]:
    """Send texts at random times, each with one of `deadlines_s`; calls take up to 10 % more or less than `batch_s`.

    Returns how many met their deadline, how many were rejected because of it, and how many were late.
    """
    rng, ends = random.Random(3), list[tuple[float, int, BatchPlan, float]]()  # noqa: S311 - traffic needs no secrets
    outcomes, names = Counter[str](), {FinishReason.FINISHED: "met", FinishReason.UNMEETABLE: "rejected"}
    now, arrives_at, num_sent = 0.0, 0.0, 0
    while ends or num_sent < num_requests:
        if ends and (ends[0][0] <= arrives_at or num_sent == num_requests):
            now, _, plan, seconds = heapq.heappop(ends)
            events = scheduler.expire(now) + scheduler.commit(plan, BatchResult(), now, seconds)
        else:
            now, deadline = arrives_at, arrives_at + rng.choice(deadlines_s)
            request = text_request(f"r{num_sent}", log_normal_length(rng), deadline=deadline, expires_at=deadline)
            events = scheduler.submit(request, now)
            num_sent += 1
            arrives_at += rng.expovariate(texts_per_s)
        outcomes.update(names.get(each.finish_reason, "late") for each in events)
        while (next_plan := scheduler.plan(now)) is not None:
            seconds = batch_s(next_plan.padded_tokens) * rng.uniform(0.9, 1.1)
            heapq.heappush(ends, (now + seconds, next_plan.session, next_plan, seconds))
    return outcomes


class FifoBatches:
    """For comparison: takes waiting texts as they come, up to `max_rows`, of any length; one text a request."""

    def __init__(self, max_rows: int, num_sessions: int = 2) -> None:
        self._max_rows, self._waiting = max_rows, deque[SchedulableRequest]()
        self._idle_sessions = list(range(num_sessions))

    def submit(self, request: SchedulableRequest, now: float) -> list[RequestFinished]:  # noqa: ARG002
        """Accept a request."""
        self._waiting.append(request)
        return []

    def plan(self, now: float) -> BatchPlan | None:  # noqa: ARG002
        """Return the next batch."""
        if not self._waiting or not self._idle_sessions:
            return None
        taken = [self._waiting.popleft() for _ in range(min(self._max_rows, len(self._waiting)))]
        rows, lengths = (
            tuple(ItemId(each.attempt_id, 0) for each in taken),
            tuple(each.num_tokens[0] for each in taken),
        )
        return BatchPlan(self._idle_sessions.pop(), TEXT_KEY, rows, lengths)

    def commit(self, plan: BatchPlan, result: BatchResult, now: float, seconds: float) -> list[RequestFinished]:  # noqa: ARG002
        """Finish the requests of a batch."""
        self._idle_sessions.append(plan.session)
        return [RequestFinished(row.attempt_id, FinishReason.FINISHED) for row in plan.rows]
