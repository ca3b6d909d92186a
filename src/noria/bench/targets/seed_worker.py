"""What stands behind the seed's `/t2i/batched`: its queue, and the one device thread that draws from it.

What is drawn together, and when, `microbatch.py` decides.
"""

import asyncio
import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from noria.bench.targets.drawing import Group, T2IBody
from noria.bench.targets.microbatch import Microbatcher
from noria.bench.targets.turns import Drawn, Turns


@dataclass(frozen=True)
class Waiting:
    """A request on the queue, and where its images go."""

    group: Group
    body: T2IBody
    arrived_s: float
    answer: asyncio.Future[Drawn]


class Worker:
    """Feeds the device thread from the queue, one batch after the other."""

    def __init__(self, turns: Turns, timeout_s: float, max_images: int) -> None:
        self._turns = turns
        self._batcher: Microbatcher[Waiting] = Microbatcher(timeout_s, max_images, time.monotonic())
        self._arrived = asyncio.Event()
        self._device = ThreadPoolExecutor(max_workers=1, thread_name_prefix="device")

    async def draw(self, group: Group, body: T2IBody) -> Drawn:
        """The request's images."""
        now = time.monotonic()
        waiting = Waiting(group, body, now, asyncio.get_running_loop().create_future())
        self._batcher.put(group, waiting, body.n, now)
        self._arrived.set()
        return await waiting.answer

    async def run(self) -> None:
        """For ever."""
        while True:
            self._arrived.clear()
            if batch := self._batcher.fetch(time.monotonic()):
                await self._draw(batch)
            else:
                await self._something_happens()

    async def _something_happens(self) -> None:
        tick_s = self._batcher.next_tick()
        patience_s = None if tick_s is None else max(0.0, tick_s - time.monotonic())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._arrived.wait(), patience_s)

    async def _draw(self, batch: list[Waiting]) -> None:
        bodies, arrived_s = [waiting.body for waiting in batch], [waiting.arrived_s for waiting in batch]
        loop = asyncio.get_running_loop()
        try:
            drawn = await loop.run_in_executor(self._device, self._turns.draw, batch[0].group, bodies, arrived_s)
        except Exception as error:  # the pipeline raises many kinds; the callers are told, the server goes on
            for waiting in batch:
                if not waiting.answer.done():
                    waiting.answer.set_exception(error)
            return
        for waiting, each in zip(batch, drawn, strict=True):
            if not waiting.answer.done():  # its client has left
                waiting.answer.set_result(each)
