"""A worker of jobs that runs as long as a context."""

import asyncio
import contextlib
import time

from noria.jobs.thread_offloader import ThreadOffloader
from noria.jobs.worker import JobWorker
from noria.observe.traces.tracer import GLOBAL_TRACER


@contextlib.asynccontextmanager
async def running_worker(
    store, results, executor, owner="server/frontend-0/1", clock=time.time, tracer=GLOBAL_TRACER, offload=None
):
    """Run a worker of `store` in a task of its own, which writes files in the threads of `offload`."""
    threads = offload or ThreadOffloader()
    worker = JobWorker(store, results, executor, threads, owner, clock, tracer)
    task = asyncio.create_task(worker.run())
    try:
        yield worker
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await worker.stop()
        if offload is None:
            threads.close()
