"""Resolves host names with a time limit, in threads of its own: the system's resolver may block for half a minute."""

import asyncio
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_TIMEOUT_S = 5.0  # the resolver's default timeout for one name server; a POST waits for it
_NUM_THREADS = 8

GetAddrInfo = Callable[..., list[tuple[Any, Any, Any, Any, tuple[Any, ...]]]]


class Resolver:
    """A `ResolveHost` with a thread pool.

    A lookup that timed out keeps its thread until the system's resolver returns.
    """

    def __init__(self, look_up: GetAddrInfo = socket.getaddrinfo, timeout_s: float = _TIMEOUT_S) -> None:
        self._look_up, self._timeout_s = look_up, timeout_s
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="resolve")

    async def __call__(self, host: str, port: int) -> list[str]:
        """The addresses of `host`, in the system's order.

        Raises:
            OSError: it has none, or the lookup, or waiting for a thread, took too long.

        """
        lookup = asyncio.get_running_loop().run_in_executor(
            self._pool, self._look_up, host, port, 0, socket.SOCK_STREAM
        )
        try:
            async with asyncio.timeout(self._timeout_s):
                entries = await lookup
        except TimeoutError as error:
            raise OSError(f"no answer within {self._timeout_s:g} s; try again later") from error
        return [str(entry[4][0]) for entry in entries]

    def close(self) -> None:
        """Release the threads without waiting for pending lookups."""
        self._pool.shutdown(wait=False, cancel_futures=True)
