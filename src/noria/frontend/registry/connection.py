"""The registry as the routes of a front end use it: opened by the first that needs it, in threads.

So a server whose registry is away serves all else.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TypeVar

from sqlalchemy import Connection, Engine

from noria.errors import ConfigError, RegistryConflict, RegistryError, RegistryUnavailable
from noria.frontend.access.fair_threads import FairTurns
from noria.storage.database import interrupt
from noria.storage.thread_offloader import ThreadOffloader

_NUM_THREADS = 4
_NUM_LINEAGE_THREADS = 2
_MAX_WAIT_S = 10.0
_RETRY_AFTER_S = 5.0

T = TypeVar("T")

log = logging.getLogger("noria.registry")


class RegistryConnection:
    """Runs work with the registry's database until `close`; `open_engine` opens it, and may raise ConfigError."""

    def __init__(self, open_engine: Callable[[], Engine], clock: Callable[[], float] = time.time) -> None:
        self._open_engine, self.clock = open_engine, clock
        self.offload = ThreadOffloader(
            RegistryUnavailable, "registry's database", "registry's file", _NUM_THREADS, _MAX_WAIT_S
        )
        # Its own threads: however much lineage clients send and read, deployments do not wait for them.
        self._offload_lineage = ThreadOffloader(
            RegistryUnavailable, "registry's database", "registry's file", _NUM_LINEAGE_THREADS
        )
        self._lineage_turns = FairTurns(_NUM_LINEAGE_THREADS)
        self._opening = asyncio.Lock()
        self._engine: Engine | None = None
        self._closed_until = 0.0  # by the clock: it could not be opened a moment ago

    async def run(self, work: Callable[[Engine], T]) -> T:
        """Return what `work` returns, in a thread.

        Raises:
            RegistryConflict: `work` raised RegistryError.
            RegistryUnavailable: the database does not answer, or cannot be opened.
        """
        engine = await self._opened()
        try:
            return await self.offload(work, engine)
        except RegistryError as error:
            raise RegistryConflict(error.message) from error

    async def run_lineage(self, client: str, work: Callable[[Engine], T]) -> T:
        """Run work with lineage like `run`, in turns with that of other clients. Raises what `run` raises."""
        engine = await self._opened()
        try:
            async with asyncio.timeout(_MAX_WAIT_S):
                await self._lineage_turns.acquire(client)
        except TimeoutError:
            raise RegistryUnavailable(
                "too many requests with lineage wait; try again later.", retry_after_s=_RETRY_AFTER_S
            ) from None
        try:
            return await self._offload_lineage(work, engine)
        except RegistryError as error:
            raise RegistryConflict(error.message) from error
        finally:
            self._lineage_turns.release()

    async def _opened(self) -> Engine:
        async with self._opening:
            if self._engine is None:
                self._engine = await self._open()
        return self._engine

    async def _open(self) -> Engine:
        """Open the registry, unless that failed a moment ago: so calls that waited for it do not all wait again."""
        wait_s = self._closed_until - self.clock()
        if 0 < wait_s <= _RETRY_AFTER_S:
            raise _cannot_be_opened(wait_s)
        try:
            return await self.offload(self._open_engine)
        except (ConfigError, RegistryUnavailable) as error:
            log.error("%s", error.message)
            self._closed_until = self.clock() + _RETRY_AFTER_S
            raise _cannot_be_opened(_RETRY_AFTER_S) from error

    async def close(self) -> None:
        """End the calls that wait for the database, and close it."""
        if self._engine is not None:
            interrupt(self._engine)
        await asyncio.to_thread(self.offload.close)
        await asyncio.to_thread(self._offload_lineage.close)
        if self._engine is not None:
            self._engine.dispose()


def reading(read: Callable[[Connection], T]) -> Callable[[Engine], T]:
    """Return work for `run` that calls `read` with a connection."""

    def work(engine: Engine) -> T:
        with engine.connect() as connection:
            return read(connection)

    return work


def _cannot_be_opened(retry_after_s: float) -> RegistryUnavailable:
    return RegistryUnavailable(
        "the registry cannot be opened; the server's log has the reason.", retry_after_s=retry_after_s
    )
