"""Resolves host names with a time limit, in threads of its own: the system's resolver may block for half a minute."""

import asyncio
import socket
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_TIMEOUT_S = 5.0  # the resolver's default timeout for one name server; a POST waits for it
_NUM_THREADS = 16
_MAX_PER_CLIENT = 4  # a quarter: the slow names of one client keep no other's from being looked up

GetAddrInfo = Callable[..., list[tuple[Any, Any, Any, Any, tuple[Any, ...]]]]


class Resolver:
    """A `ResolveHost` with a thread pool.

    A lookup that timed out keeps its thread until the system's resolver returns.
    """

    def __init__(self, look_up: GetAddrInfo = socket.getaddrinfo, timeout_s: float = _TIMEOUT_S) -> None:
        self._look_up, self._timeout_s = look_up, timeout_s
        self._lock = threading.Lock()
        self._num_lookups: Counter[str] = Counter()  # by client; no entry is 0
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="resolve")

    async def __call__(self, host: str, port: int, client: str = "") -> list[str]:
        """Look `host` up for `client` (the empty one has no limit); return its addresses in system order.

        Raises:
            TimeoutError: the lookup, or waiting for a thread, took too long, or `client` has too many that do.
            OSError: it has none.
        """
        if client and self._num_lookups[client] >= _MAX_PER_CLIENT:
            raise TimeoutError(f"{_MAX_PER_CLIENT} other lookups of the same client are under way")
        with self._lock:
            self._num_lookups[client] += 1
        lookup = self._pool.submit(self._look_up, host, port, 0, socket.SOCK_STREAM)
        lookup.add_done_callback(lambda _: self._release(client))
        try:
            async with asyncio.timeout(self._timeout_s):
                entries = await asyncio.wrap_future(lookup)
        except TimeoutError as error:
            raise TimeoutError(f"no answer within {self._timeout_s:g} s") from error
        return [str(entry[4][0]) for entry in entries]

    def _release(self, client: str) -> None:
        """Called in the lookup's thread: one that timed out counts until the system's resolver returns."""
        with self._lock:
            self._num_lookups[client] -= 1
            if not self._num_lookups[client]:
                del self._num_lookups[client]

    def close(self) -> None:
        """Release the threads without waiting for pending lookups."""
        self._pool.shutdown(wait=False, cancel_futures=True)
