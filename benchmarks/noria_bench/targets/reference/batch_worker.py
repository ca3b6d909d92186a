"""The queue and the device thread of the reference server's `/t2i/batched`.

`microbatcher` decides what runs together, and when.
"""

import asyncio
import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from noria_bench.targets.pipeline_generator import BatchKey, T2IBody
from noria_bench.targets.reference.microbatcher import Microbatcher
from noria_bench.targets.reference.serialized_pipeline import GenerationResult, SerializedPipeline


@dataclass(frozen=True)
class PendingRequest:
    """A queued request and the future of its result."""

    batch_key: BatchKey
    body: T2IBody
    arrived_s: float
    future: asyncio.Future[GenerationResult]


class BatchWorker:
    """Runs one batch after the other in the device thread."""

    def __init__(self, pipeline: SerializedPipeline, timeout_s: float, max_images: int) -> None:
        self._pipeline = pipeline
        self._batcher: Microbatcher[PendingRequest] = Microbatcher(timeout_s, max_images, time.monotonic())
        self._arrived = asyncio.Event()
        self._device = ThreadPoolExecutor(max_workers=1, thread_name_prefix="device")

    async def generate(self, batch_key: BatchKey, body: T2IBody) -> GenerationResult:
        """Queue a request and wait for its result."""
        now = time.monotonic()
        pending = PendingRequest(batch_key, body, now, asyncio.get_running_loop().create_future())
        self._batcher.put(batch_key, pending, body.n, now)
        self._arrived.set()
        return await pending.future

    async def run(self) -> None:
        """Run batches until cancelled; then the device thread ends too."""
        try:
            while True:
                self._arrived.clear()
                if batch := self._batcher.fetch(time.monotonic()):
                    await self._run_batch(batch)
                else:
                    await self._wait_for_work()
        finally:
            self._device.shutdown(wait=False)

    async def _wait_for_work(self) -> None:
        tick_s = self._batcher.next_tick()
        wait_s = None if tick_s is None else max(0.0, tick_s - time.monotonic())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._arrived.wait(), wait_s)

    async def _run_batch(self, batch: list[PendingRequest]) -> None:
        bodies, arrived_s = [pending.body for pending in batch], [pending.arrived_s for pending in batch]
        loop = asyncio.get_running_loop()
        try:
            results = await loop.run_in_executor(
                self._device, self._pipeline.generate, batch[0].batch_key, bodies, arrived_s
            )
        # The pipeline raises errors of many kinds: the callers get them, and the server continues.
        except Exception as error:
            for pending in batch:
                if not pending.future.done():
                    pending.future.set_exception(error)
            return
        for pending, result in zip(batch, results, strict=True):
            # Done if the client has disconnected.
            if not pending.future.done():
                pending.future.set_result(result)
