"""A closed loop of users: each sends a request, waits for the answer and sends the next.

One thread and one connection per user.
"""

import http.client
import itertools
import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

# Some frameworks would compress JSON again whose images are compressed already.
HEADERS = {"content-type": "application/json", "accept-encoding": "identity"}
_TIMING = re.compile(r"\b(\w+);dur=([\d.]+)")


@dataclass(frozen=True)
class Reply:
    """An answer; times are monotonic seconds."""

    sent_s: float
    done_s: float
    status: int  # 0: the connection broke
    num_bytes: int
    number: int = 0  # number of the request in its run
    predicted_s: float | None = None  # the server's prediction at admission, from arrival to the last pixels

    @property
    def latency_s(self) -> float:
        """Seconds from the request to the answer."""
        return self.done_s - self.sent_s


def run_closed_loop(
    port: int,
    num_users: int,
    seconds: float,
    body: Callable[[int], Mapping[str, Any] | bytes],
    path: str = "/t2i",
    max_requests: int | None = None,
    ended: threading.Event | None = None,
    pause_s: float = 0.0,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> list[Reply]:
    """Load `POST path` on loopback `port` for `seconds`, or with `max_requests`, or until `ended`.

    Request k has `body(k)`, as JSON unless it is bytes, and `headers`. Each user pauses `pause_s` after an answer.
    Returns replies in the order of their end.
    """
    numbers = itertools.count() if max_requests is None else iter(range(max_requests))
    replies, interrupted = list[Reply](), ended or threading.Event()
    stop = time.monotonic() + seconds

    def user_loop() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        while time.monotonic() < stop and not interrupted.is_set() and (number := next(numbers, None)) is not None:
            content = body(number)
            text, sent = content if isinstance(content, bytes) else json.dumps(content), time.monotonic()
            try:
                connection.request("POST", path, text, {"content-type": "application/json", **headers})
                answer = connection.getresponse()
                status, num_bytes = answer.status, len(answer.read())
                predicted = stage_seconds(answer.headers.get("Server-Timing", "")).get("predicted") or None
            except (OSError, http.client.HTTPException):
                # The next request opens it again.
                connection.close()
                status, num_bytes, predicted = 0, 0, None
            replies.append(Reply(sent, time.monotonic(), status, num_bytes, number, predicted))
            if pause_s:
                interrupted.wait(pause_s)
        connection.close()

    users = [threading.Thread(target=user_loop) for _ in range(num_users)]
    try:
        for user in users:
            user.start()
        for user in users:
            user.join()
    # Also after Ctrl-C, even while users start: no further request to a server that is about to end.
    finally:
        interrupted.set()
    return sorted(replies, key=lambda reply: reply.done_s)


def stage_seconds(server_timing: str) -> dict[str, float]:
    """The seconds of each name in a Server-Timing header."""
    return {name: float(ms) / 1000 for name, ms in _TIMING.findall(server_timing)}


def images_per_second(replies: list[Reply], warm_up_s: float) -> float:
    """Completions per second from the first one after `warm_up_s` to the last; the first is not counted.

    Raises:
        RuntimeError: fewer than two images came back after the warm-up.

    """
    start = min(reply.sent_s for reply in replies) + warm_up_s
    ends = [reply.done_s for reply in replies if reply.done_s >= start and reply.status == 200]
    if len(ends) < 2:
        raise RuntimeError(f"only {len(ends)} images came back after the warm-up: too few to count")
    return (len(ends) - 1) / (ends[-1] - ends[0])
