"""Statistics over the last minute of an engine, for live views: throughput, occupancy, latency percentiles.

Events are counted in buckets of one second, so that memory does not grow with the number of iterations. The time is an
argument, in seconds of any one clock.
"""

from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from noria.engine.loop import Client
from noria.protocol.live_views import RatesView

WINDOW_S = 60
_MAX_REQUESTS_PER_BUCKET = 1000  # whose latencies are kept; more would not change the percentiles
_MAX_CLIENTS_PER_BUCKET = 100  # whose time is counted apart from that of the others
_OTHERS = ""


@dataclass(slots=True)
class _Bucket:
    start_s: int
    busy_s: float = 0.0
    slot_s: float = 0.0  # summed over the used slots
    num_iterations: int = 0  # with steps
    num_steps: int = 0
    num_images: int = 0
    num_requests: int = 0
    latencies_s: list[float] = field(default_factory=list)
    busy_by_client: dict[str, float] = field(default_factory=dict)  # s, by whose share of the device it is

    def divide(self, seconds: float, parts: Mapping[Client, int]) -> None:
        """Divide seconds among clients."""
        busy_by_client, per_part = self.busy_by_client, seconds / sum(parts.values())
        for (_, name), part in parts.items():
            is_named = name in busy_by_client or len(busy_by_client) < _MAX_CLIENTS_PER_BUCKET
            client = name if is_named else _OTHERS
            busy_by_client[client] = busy_by_client.get(client, 0.0) + per_part * part


class SlidingStats:
    """Counts of each of the last `WINDOW_S` seconds."""

    def __init__(self, num_slots: int, now: float) -> None:
        self._num_slots, self._started = num_slots, now
        self._buckets: deque[_Bucket] = deque(maxlen=WINDOW_S)

    def add_iteration(
        self, duration_s: float, num_running: int, num_stepped: int, parts: Mapping[Client, int], now: float
    ) -> None:
        """Count an iteration that ended now, with `num_running` images in slots, `num_stepped` of which made a step.

        Its duration is divided among clients in proportion to their `parts`.
        """
        bucket = self._bucket(now)
        if parts:
            bucket.divide(duration_s, parts)
        bucket.busy_s += duration_s
        bucket.slot_s += duration_s * num_running
        bucket.num_iterations += num_stepped > 0
        bucket.num_steps += num_stepped

    def add_image(self, now: float, count: int = 1) -> None:
        """Count completed images or texts."""
        self._bucket(now).num_images += count

    def add_request(self, latency_s: float, now: float) -> None:
        """Count a request that finished `latency_s` after its arrival."""
        bucket = self._bucket(now)
        bucket.num_requests += 1
        if len(bucket.latencies_s) < _MAX_REQUESTS_PER_BUCKET:
            bucket.latencies_s.append(latency_s)

    def has_recent(self, now: float) -> bool:
        """Whether anything was counted in the last minute, so that the view still changes with time."""
        return bool(self._buckets) and self._buckets[-1].start_s > int(now) - WINDOW_S

    def view(self, now: float) -> RatesView:
        """The rates over the last minute, or since the start if that is shorter; at least one second."""
        first = int(now) - WINDOW_S + 1
        recent = [bucket for bucket in self._buckets if bucket.start_s >= first]
        window_s = max(now - max(self._started, first), 1.0)
        latencies_s = [latency_s for bucket in recent for latency_s in bucket.latencies_s]
        p50_s, p95_s, p99_s = np.percentile(latencies_s, (50, 95, 99)).tolist() if latencies_s else (None, None, None)
        num_iterations = sum(bucket.num_iterations for bucket in recent)
        num_steps = sum(bucket.num_steps for bucket in recent)
        # An iteration counts in the second in which it ended, so a long one may count for more than the window.
        return RatesView(
            window_s=window_s,
            requests_per_s=sum(bucket.num_requests for bucket in recent) / window_s,
            images_per_s=sum(bucket.num_images for bucket in recent) / window_s,
            steps_per_s=num_steps / window_s,
            p50_s=p50_s,
            p95_s=p95_s,
            p99_s=p99_s,
            mean_batch=num_steps / num_iterations if num_iterations else 0.0,
            occupancy=min(sum(bucket.slot_s for bucket in recent) / (window_s * self._num_slots), 1.0),
            busy=min(sum(bucket.busy_s for bucket in recent) / window_s, 1.0),
        )

    def shares(self, now: float) -> dict[str, float]:
        """The parts of the clients in the time of the last minute's iterations, which sum up to 1."""
        first, busy_s = int(now) - WINDOW_S + 1, Counter[str]()
        for bucket in self._buckets:
            if bucket.start_s >= first:
                busy_s.update(bucket.busy_by_client)
        total_s = busy_s.total()
        return {client: seconds / total_s for client, seconds in busy_s.items()} if total_s else {}

    def _bucket(self, now: float) -> _Bucket:
        if not self._buckets or self._buckets[-1].start_s != int(now):
            self._buckets.append(_Bucket(int(now)))
        return self._buckets[-1]
