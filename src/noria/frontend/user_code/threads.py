"""The threads of a front end in which methods of endpoints run that are not async.

A call that does not end keeps its thread, because Python cannot stop one. So there are few, and when all of them are
in calls that have exceeded their time limit, further calls are rejected instead of left waiting. The threads are
daemons: a call that does not end does not keep the process from ending.
"""

import asyncio
import contextlib
import contextvars
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from noria.errors import UserCodeBusy
from noria.observe.logs.log_record import fields
from noria.observe.metrics import declarations

_log = logging.getLogger("noria.user_code")
RETRY_AFTER_S = 5.0
_MAX_WAITING = 16  # calls for each thread

Outcome = tuple[Any, BaseException | None]
"""The value that a call returned, or the exception that it raised."""


@dataclass(eq=False)
class _Job:
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    context: contextvars.Context
    ends_at: float  # monotonic
    loop: asyncio.AbstractEventLoop
    outcome: "asyncio.Future[Outcome]"


class UserThreads:
    """At most `max_threads` threads, started when they are needed. One event loop calls it."""

    def __init__(self, max_threads: int) -> None:
        self._max_threads = max_threads
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._running: set[_Job] = set()
        self._num_threads = self._num_waiting = 0
        self._are_all_stuck = False

    async def run(self, timeout_s: float, function: Callable[..., Any], *arguments: Any) -> Outcome:
        """Call `function` in a thread, in the current context. The wait for a free thread is part of the time limit.

        Raises:
            TimeoutError: it has not returned within `timeout_s`; it may still run.
            UserCodeBusy: all threads are in calls that have exceeded their time limits, or too many calls wait.
        """
        loop = asyncio.get_running_loop()
        if self._num_stuck() == self._max_threads:
            raise UserCodeBusy(
                f"all {self._max_threads} threads for the code of endpoints are in calls that have exceeded their time "
                "limit; raise frontend.user_code_threads, or mend the code.",
                retry_after_s=RETRY_AFTER_S,
            )
        if self._num_waiting >= _MAX_WAITING * self._max_threads:
            raise UserCodeBusy(
                f"{self._num_waiting} calls of the code of endpoints wait for {self._max_threads} threads; try again "
                "later, or raise frontend.user_code_threads.",
                retry_after_s=RETRY_AFTER_S,
            )
        context = contextvars.copy_context()
        job = _Job(function, arguments, context, time.monotonic() + timeout_s, loop, loop.create_future())
        with self._lock:
            self._num_waiting += 1
            needs_thread = len(self._running) + self._num_waiting > self._num_threads < self._max_threads
            self._num_threads += needs_thread
        if needs_thread:
            threading.Thread(target=self._run, name=f"user-code-{self._num_threads}", daemon=True).start()
        self._jobs.put(job)
        try:
            async with asyncio.timeout(timeout_s):
                return await job.outcome
        except TimeoutError:
            job.ends_at = 0.0  # the event loop's clock may be a millisecond ahead
            self._report_stuck()
            raise

    def close(self) -> None:
        """End the threads that are idle, and the others when their calls end."""
        for _ in range(self._num_threads):
            self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            with self._lock:
                self._num_waiting -= 1
                if job.outcome.cancelled():
                    continue
                self._running.add(job)
            outcome: Outcome
            try:
                outcome = job.context.run(job.function, *job.arguments), None
            except BaseException as error:  # also SystemExit: it is this request's
                outcome = None, error
            with self._lock:
                self._running.discard(job)
            if time.monotonic() >= job.ends_at:
                self._report_stuck()
            with contextlib.suppress(RuntimeError):  # the event loop is closed
                job.loop.call_soon_threadsafe(_deliver, job.outcome, outcome)
            del job, outcome  # what they hold may be large, and the next job may come late

    def _num_stuck(self) -> int:
        now = time.monotonic()
        with self._lock:
            return sum(now >= job.ends_at for job in self._running)

    def _report_stuck(self) -> None:
        num_stuck = self._num_stuck()
        declarations.USER_CODE_STUCK_THREADS.set(num_stuck)
        were_all_stuck, self._are_all_stuck = self._are_all_stuck, num_stuck == self._max_threads
        if self._are_all_stuck and not were_all_stuck:
            _log.error(
                "all %d threads for the code of endpoints are in calls that have exceeded their time limit: further "
                "calls are rejected until one ends",
                self._max_threads,
                extra=fields(event="user_code_stuck"),
            )


def _deliver(future: "asyncio.Future[Outcome]", outcome: Outcome) -> None:
    if not future.done():
        future.set_result(outcome)
