"""Asks the system for the addresses of a host, which may take half a minute: the time is bounded, and nobody else's threads wait."""

import asyncio
import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

_TIMEOUT_S = 5.0  # a name server's first time-out; a POST waits for it
_NUM_THREADS = 8

GetAddrInfo = Callable[..., list[tuple[Any, Any, Any, Any, tuple[Any, ...]]]]


class Resolver:
    """A `Resolve` in threads of its own. A look-up that is given up goes on in its thread until the system ends it."""

    def __init__(self, look_up: GetAddrInfo = socket.getaddrinfo, timeout_s: float = _TIMEOUT_S) -> None:
        self._look_up, self._timeout_s = look_up, timeout_s
        self._pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="resolve")

    async def __call__(self, host: str, port: int) -> list[str]:
        """The addresses of `host`, in the system's order.

        Raises:
            OSError: it has none, or the answer, or a thread to ask in, took too long.

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
        """Let go of the threads, without waiting for those that still ask."""
        self._pool.shutdown(wait=False, cancel_futures=True)
