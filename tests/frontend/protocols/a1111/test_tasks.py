"""Tasks of A1111's clients."""

import asyncio
from types import SimpleNamespace

import pytest

from noria.errors import RequestCancelled
from noria.frontend.engines.results import PreviewImage, ProgressUpdate
from noria.frontend.protocols.a1111.tasks import A1111Task, A1111Tasks


def test_task_keeps_the_latest_progress_and_preview():
    task = A1111Task(admitted=None)
    first, second = ProgressUpdate(3, 0, 20, 5.0), ProgressUpdate(None, 4, 20, 4.0)
    early, late = PreviewImage(0, 2, 1, 1, b"abc"), PreviewImage(0, 4, 1, 1, b"def")
    for update in (first, early, second, late):
        task.update(update)
    assert (task.progress, task.preview) == (second, late)
    task.interrupt()  # before it generates
    assert task.interrupted


async def test_a_client_interrupts_its_own_tasks_and_sees_them_oldest_first_until_they_end():
    async def generate(admitted, _on_update):
        await admitted.is_done.wait()
        return "result"

    alice, bob = object(), object()
    requests = [
        SimpleNamespace(context=SimpleNamespace(api_client=client), is_done=asyncio.Event())
        for client in (alice, bob, alice, alice)
    ]
    tasks = A1111Tasks(SimpleNamespace(generate=generate))
    calls = [asyncio.create_task(tasks.generate(request)) for request in requests]
    await asyncio.sleep(0)
    assert [task.admitted for task in tasks.of_client(alice)] == [requests[0], *requests[2:]]
    tasks.of_client(alice)[0].interrupt()
    with pytest.raises(RequestCancelled, match=r"^interrupted by POST /sdapi/v1/interrupt or /skip\.$"):
        await calls[0]
    calls[2].cancel()  # its client has disconnected
    with pytest.raises(asyncio.CancelledError):
        await calls[2]
    assert [task.admitted for task in tasks.of_client(alice)] == [requests[3]]
    for request in requests:
        request.is_done.set()
    assert [await calls[1], await calls[3]] == ["result", "result"]
    assert tasks.of_client(alice) == tasks.of_client(bob) == []
