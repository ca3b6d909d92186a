"""Clients that leave: whatever is being done for one ends with it."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request

from noria.errors import RequestCancelled

T = TypeVar("T")


async def run_until(end: Coroutine[Any, Any, object], work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Do `work`, and cancel it at `end`: a task that is done, or was cancelled."""
    work_task, end_task = asyncio.create_task(work), asyncio.create_task(end)
    try:
        await asyncio.wait({work_task, end_task}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        work_task.cancel()
        end_task.cancel()
        await asyncio.gather(work_task, end_task, return_exceptions=True)
    return work_task


async def cancel_on_disconnect(http: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves; the body of `http` must have been read."""

    async def client_disconnected() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    work_task = await run_until(client_disconnected(), work)
    if work_task.cancelled():
        raise RequestCancelled("the client closed the connection.")
    return work_task.result()
