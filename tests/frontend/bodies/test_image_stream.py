"""The updates of a generation that is watched by a slow reader."""

import asyncio

from noria.frontend.bodies.image_stream import LatestUpdates, StreamedGeneration
from noria.frontend.engines.results import PreviewImage, ProgressUpdate


def test_unread_updates_are_every_preview_and_the_newest_progress():
    async def scenario():
        updates = LatestUpdates()
        previews = [PreviewImage(0, step, 1, 1, b"rgb") for step in range(3)]
        for step in range(1000):
            updates.put(ProgressUpdate(None, step, 1000, 1.0))
        for preview in previews:
            updates.put(preview)
        await updates.wait()
        assert updates.take() == [*previews, ProgressUpdate(None, 999, 1000, 1.0)]
        assert updates.take() == []

    asyncio.run(scenario())


def test_updates_that_come_while_the_reader_is_slow_are_yielded_before_the_result():
    class FakeService:
        """A generation that ends when the first update is read."""

        def __init__(self):
            self.is_read = asyncio.Event()

        async def generate(self, _admitted, on_update):
            on_update(ProgressUpdate(None, 0, 2, 1.0))
            await self.is_read.wait()
            on_update(PreviewImage(0, 1, 1, 1, b"rgb"))
            return "result"

    async def scenario():
        service, received = FakeService(), []
        generation = StreamedGeneration(service, admitted=None)
        async for update in generation.updates():
            received.append(update)
            service.is_read.set()
            await asyncio.wait([generation._task])  # a slow reader
        assert received == [ProgressUpdate(None, 0, 2, 1.0), PreviewImage(0, 1, 1, 1, b"rgb"), "result"]

    asyncio.run(scenario())
