"""Calls that wait for a disk, a database or a store of objects: in threads, so that the event loop never does."""

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

NUM_REQUEST_THREADS = 8  # for the routes, webhooks and tidying
NUM_WORKER_THREADS = (
    4  # for claims and leases: kept apart, so that they never stand in line behind a hundred slow readers
)


class ThreadOffloader:
    """Runs calls in threads of its own: `await blocking(store.get, job_id)`."""

    def __init__(self, num_threads: int = NUM_REQUEST_THREADS) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="jobs")

    async def __call__(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """What `call` returns or raises.

        Raises:
            JobsUnavailable: the database or the filesystem failed.

        """
        context = contextvars.copy_context()  # whose work it is: no thread has it by itself
        bound_call = functools.partial(context.run, call, *args, **kwargs)
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, bound_call)
        except (SQLAlchemyError, OSError) as error:
            failed_part = "database" if isinstance(error, SQLAlchemyError) else "results folder"
            raise JobsUnavailable(
                f"the jobs' {failed_part} does not answer; try again later.", retry_after_s=5.0
            ) from error

    def close(self) -> None:
        """Wait for the calls that run."""
        self._pool.shutdown()
