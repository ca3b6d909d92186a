"""Records OpenLineage's events in the registry, which is opened by the first of them.

So a server that gets no events needs no registry, and one whose registry is away serves all else.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

import msgspec
from sqlalchemy import Engine

from noria.errors import ConfigError, InvalidBody, RegistryUnavailable
from noria.registry.lineage_store import LineageStore
from noria.registry.openlineage import Event, parse_event
from noria.storage.database import interrupt
from noria.storage.thread_offloader import ThreadOffloader

_NUM_THREADS = 4
_MAX_WAIT_S = 10.0
_RETRY_AFTER_S = 5.0

log = logging.getLogger("noria.registry")


class LineageService:
    """Records events with `record` until `close`; `open_engine` opens the registry, and may raise ConfigError."""

    def __init__(self, open_engine: Callable[[], Engine], clock: Callable[[], float] = time.time) -> None:
        self._open_engine, self._clock = open_engine, clock
        self._offload = ThreadOffloader(
            RegistryUnavailable, "registry's database", "registry's file", _NUM_THREADS, _MAX_WAIT_S
        )
        self._opening = asyncio.Lock()
        self._engine: Engine | None = None
        self._closed_until = 0.0  # by the clock: it could not be opened a moment ago

    async def record(self, body: bytes, received_from: str) -> None:
        """Record one event.

        Raises:
            InvalidBody, InvalidField: see `parse_event`.
            RegistryUnavailable: the database does not answer, or cannot be opened.

        """
        await self._record(lambda: [parse_event(body)], received_from)

    async def record_batch(self, body: bytes, received_from: str) -> None:
        """Record a JSON list of events, if all are valid. Raises what `record` raises."""
        await self._record(lambda: _parse_batch(body), received_from)

    async def _record(self, parse: Callable[[], Sequence[Event]], received_from: str) -> None:
        """Parse, which takes long for large events, and record in threads."""
        events = await self._offload(parse)
        async with self._opening:
            if self._engine is None:
                self._engine = await self._open()
        await self._offload(LineageStore(self._engine).record, events, received_from, self._clock())

    async def _open(self) -> Engine:
        """Open the registry, unless that failed a moment ago: so calls that waited for it do not all wait again."""
        wait_s = self._closed_until - self._clock()
        if 0 < wait_s <= _RETRY_AFTER_S:
            raise _cannot_be_opened(wait_s)
        try:
            return await self._offload(self._open_engine)
        except (ConfigError, RegistryUnavailable) as error:
            log.error("%s", error.message)
            self._closed_until = self._clock() + _RETRY_AFTER_S
            raise _cannot_be_opened(_RETRY_AFTER_S) from error

    async def close(self) -> None:
        """End the calls that wait for the database, and close it."""
        if self._engine is not None:
            interrupt(self._engine)
        await asyncio.to_thread(self._offload.close)
        if self._engine is not None:
            self._engine.dispose()


def _cannot_be_opened(retry_after_s: float) -> RegistryUnavailable:
    return RegistryUnavailable(
        "the registry cannot be opened; the server's log has the reason.", retry_after_s=retry_after_s
    )


def _parse_batch(body: bytes) -> list[Event]:
    try:
        raw_events = msgspec.json.decode(body, type=list[msgspec.Raw])
    except msgspec.ValidationError as error:
        raise InvalidBody(f"the body is not a list of events: {error}.") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidBody(f"the body is not JSON: {error}.") from error
    return [parse_event(bytes(raw), f"[{number}].") for number, raw in enumerate(raw_events)]
