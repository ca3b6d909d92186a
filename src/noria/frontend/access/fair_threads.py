"""Threads for work on uploads, which takes a core and memory: a few run at once, and clients take turns.

A client is what `concurrency_limits.py` names. One with many calls waits behind one call of each other client.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class FairTurns:
    """Gives at most `num_turns` turns at once, to clients one after the other, for one event loop."""

    def __init__(self, num_turns: int) -> None:
        self._num_free = num_turns
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by client, in the order of turns; none is empty

    async def acquire(self, client: str) -> None:
        """Wait for the turn of `client`, which lasts until `release`."""
        if self._num_free:
            self._num_free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release()
            else:
                self._remove(client, turn)
            raise

    def release(self) -> None:
        """End a turn."""
        if not self._waiting:
            self._num_free += 1
            return
        client = next(iter(self._waiting))
        turn = self._waiting[client][0]
        self._remove(client, turn)
        if client in self._waiting:
            self._waiting[client] = self._waiting.pop(client)
        turn.set_result(None)

    def _remove(self, client: str, turn: asyncio.Future[None]) -> None:
        self._waiting[client].remove(turn)
        if not self._waiting[client]:
            del self._waiting[client]


class FairThreads:
    """Runs calls in at most `num_threads` threads, for one event loop."""

    def __init__(self, num_threads: int) -> None:
        self._turns = FairTurns(num_threads)

    async def run(self, client: str, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Return what `function` returns in a thread, when it is the turn of `client`.

        A call that is cancelled while it waits is not made. The thread of one that runs is used until it returns.
        """
        await self._turns.acquire(client)
        call = asyncio.ensure_future(asyncio.to_thread(function, *args, **kwargs))
        call.add_done_callback(self._on_done)
        return await asyncio.shield(call)

    def _on_done(self, call: asyncio.Future[T]) -> None:
        if not call.cancelled():
            call.exception()  # which nobody may wait for any more
        self._turns.release()
