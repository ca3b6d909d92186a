"""Runs blocking calls (disk, database, object store) in threads, so that the event loop never waits for them."""

import asyncio
import contextvars
import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from sqlalchemy.exc import SQLAlchemyError

from noria.errors import NoriaError
from noria.storage.outage_log import OutageLog

P = ParamSpec("P")
T = TypeVar("T")

_RETRY_AFTER_S = 5.0


class ThreadOffloader:
    """Runs calls in a thread pool of its own: `await offload(store.get, job_id)`.

    A call that waits longer than `max_wait_s` for a thread is not made. A call that fails with SQLAlchemyError or
    OSError raises `unavailable`, whose message says that `database` or `files` does not answer; `outages` logs why.
    """

    def __init__(
        self,
        unavailable: type[NoriaError],
        database: str,
        files: str,
        num_threads: int,
        max_wait_s: float | None = None,
        outages: OutageLog | None = None,
    ) -> None:
        self.outages = outages or OutageLog()
        self._unavailable, self._database, self._files = unavailable, database, files
        self._max_wait_s = max_wait_s
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=database.partition("'")[0])

    async def __call__(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return or raise what `call` does. Raises also `unavailable`."""
        context = contextvars.copy_context()  # threads do not inherit the request scope
        bound_call = functools.partial(context.run, call, *args, **kwargs)
        try:
            return await self._run(self._pool.submit(bound_call))
        except (SQLAlchemyError, OSError) as error:
            failed_part = self._database if isinstance(error, SQLAlchemyError) else self._files
            self.outages.add(failed_part, error)
            raise self._unavailable(
                f"the {failed_part} does not answer; try again later.", retry_after_s=_RETRY_AFTER_S
            ) from error

    async def _run(self, call: Future[T]) -> T:
        outcome = asyncio.wrap_future(call)
        try:
            done, _ = await asyncio.wait([outcome], timeout=self._max_wait_s)
        except asyncio.CancelledError:
            outcome.cancel()
            raise
        if not done and call.cancel():
            raise self._unavailable(
                f"the {self._database} or {self._files} is slow: too many requests wait for it; try again later.",
                retry_after_s=_RETRY_AFTER_S,
            )
        return await outcome

    def close(self) -> None:
        """Wait for running calls, then end the threads."""
        self._pool.shutdown()
