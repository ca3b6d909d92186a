"""The event loop of a front end in which async methods of endpoints run: in a thread of its own.

A method that blocks or computes there holds up the async methods of other requests, and nothing else. When too many
calls wait for that, further ones are rejected.
"""

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from noria.errors import UserCodeBusy
from noria.frontend.user_code.threads import RETRY_AFTER_S, Outcome

T = TypeVar("T")

_MAX_WAITING = 64  # calls that have not begun


class UserEventLoop:
    """An event loop whose thread starts with the first call. One thread calls its methods."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._num_calls = 0  # written by the calling thread
        self._num_begun = 0  # written by the loop's
        self._is_closed = False

    async def run(self, timeout_s: float, function: Callable[..., Awaitable[Any]], *arguments: Any) -> Outcome:
        """Await what `function` returns in a task of the loop, in the current context.

        Raises:
            TimeoutError: it has not ended within `timeout_s`. It is cancelled; if it ignores that, it goes on.
            UserCodeBusy: a method blocks the loop, and too many calls wait.
        """
        if self._num_calls - self._num_begun >= _MAX_WAITING:
            raise UserCodeBusy(
                f"{_MAX_WAITING} calls of async methods of endpoints wait because one of them blocks their event loop; "
                "try again later, or mend the code: a method that blocks must not be async.",
                retry_after_s=RETRY_AFTER_S,
            )
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._run, args=[self._loop], name="user-code-loop", daemon=True).start()
        self._num_calls += 1
        self._loop.call_soon_threadsafe(self._begin)
        async with asyncio.timeout(timeout_s):
            return await call_in(self._loop, _outcome_of(function, *arguments))

    def close(self) -> None:
        """Cancel all calls and end the thread, unless a method blocks it; it does not keep the process from ending."""
        self._is_closed = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:  # at the end it cancels all tasks
            runner.get_loop()
            while not self._is_closed:
                with contextlib.suppress(SystemExit):  # raised by a task that the code started
                    loop.run_forever()

    def _begin(self) -> None:
        self._num_begun += 1


async def call_in(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, T]) -> T:
    """Await `work` in another loop, in the current context. Cancelling this cancels it."""
    return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, loop))


async def _outcome_of(function: Callable[..., Awaitable[Any]], *arguments: Any) -> Outcome:
    try:
        return await function(*arguments), None
    except BaseException as error:  # also SystemExit, which would end the loop, and a cancellation of the code's own
        return None, error
