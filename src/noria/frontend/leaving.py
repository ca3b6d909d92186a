"""Clients that leave: whatever is being done for one ends with it."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request

from noria.errors import RequestCancelled

T = TypeVar("T")


async def until(end: Coroutine[Any, Any, object], work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Do `work`, and cancel it at `end`: a task that is done, or was cancelled."""
    working, ending = asyncio.create_task(work), asyncio.create_task(end)
    try:
        await asyncio.wait({working, ending}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        working.cancel()
        ending.cancel()
        await asyncio.gather(working, ending, return_exceptions=True)
    return working


async def unless_disconnected(http: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves; the body of `http` must have been read."""

    async def client_left() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    working = await until(client_left(), work)
    if working.cancelled():
        raise RequestCancelled("the client closed the connection.")
    return working.result()
