"""Runs blocking calls (disk, database, object store) in threads, so that the event loop never waits for them."""

import asyncio
import contextvars
import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from sqlalchemy.exc import SQLAlchemyError

from noria.errors import JobsUnavailable

P = ParamSpec("P")
T = TypeVar("T")

NUM_REQUEST_THREADS = 8  # for routes, webhooks and cleaning up
# For claims and leases, and for files: pools of their own, so that they never queue behind a hundred slow readers.
NUM_WORKER_THREADS = 4
NUM_WORKERS = 2  # of a front end: one for each kind of model


class ThreadOffloader:
    """Runs calls in a thread pool of its own: `await offload(store.get, job_id)`.

    A call that waits longer than `max_wait_s` for a thread is not made.
    """

    def __init__(self, num_threads: int = NUM_REQUEST_THREADS, max_wait_s: float | None = None) -> None:
        self._max_wait_s = max_wait_s
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="jobs")

    async def __call__(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return or raise what `call` does.

        Raises:
            JobsUnavailable: the database or the filesystem failed (SQLAlchemyError, OSError), or no thread was free.

        """
        context = contextvars.copy_context()  # threads do not inherit the request scope
        bound_call = functools.partial(context.run, call, *args, **kwargs)
        try:
            return await self._run(self._pool.submit(bound_call))
        except (SQLAlchemyError, OSError) as error:
            failed_part = "database" if isinstance(error, SQLAlchemyError) else "results folder"
            raise JobsUnavailable(
                f"the jobs' {failed_part} does not answer; try again later.", retry_after_s=5.0
            ) from error

    async def _run(self, call: Future[T]) -> T:
        outcome = asyncio.wrap_future(call)
        try:
            done, _ = await asyncio.wait([outcome], timeout=self._max_wait_s)
        except asyncio.CancelledError:
            outcome.cancel()
            raise
        if not done and call.cancel():
            raise JobsUnavailable(
                "the jobs' database or results folder is slow: too many requests wait for it; try again later.",
                retry_after_s=5.0,
            )
        return await outcome

    def close(self) -> None:
        """Wait for running calls, then end the threads."""
        self._pool.shutdown()
