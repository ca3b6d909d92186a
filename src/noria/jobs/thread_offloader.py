"""Runs blocking calls (disk, database, object store) in threads, so that the event loop never waits for them."""

import asyncio
import contextvars
import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from sqlalchemy.exc import SQLAlchemyError

from noria.errors import JobsUnavailable

P = ParamSpec("P")
T = TypeVar("T")

NUM_REQUEST_THREADS = 8  # for routes, webhooks and cleaning up
# For claims and leases: a pool of their own, so that they never queue behind a hundred slow readers.
NUM_WORKER_THREADS = 4


class ThreadOffloader:
    """Runs calls in a thread pool of its own: `await offload(store.get, job_id)`."""

    def __init__(self, num_threads: int = NUM_REQUEST_THREADS) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="jobs")

    async def __call__(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return or raise what `call` does.

        Raises:
            JobsUnavailable: the database or the filesystem failed (SQLAlchemyError, OSError).

        """
        context = contextvars.copy_context()  # threads do not inherit the request scope
        bound_call = functools.partial(context.run, call, *args, **kwargs)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, bound_call)
        except (SQLAlchemyError, OSError) as error:
            failed_part = "database" if isinstance(error, SQLAlchemyError) else "results folder"
            raise JobsUnavailable(
                f"the jobs' {failed_part} does not answer; try again later.", retry_after_s=5.0
            ) from error

    def close(self) -> None:
        """Wait for running calls, then end the threads."""
        self._pool.shutdown()
