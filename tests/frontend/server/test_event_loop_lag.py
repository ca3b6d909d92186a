"""The lag of a blocked event loop is measured."""

import asyncio
import time

from noria.frontend.server.event_loop_lag import monitor_event_loop_lag
from noria.observe.metrics.declarations import REGISTRY


async def test_a_blocked_event_loop_is_measured_as_lag():
    before = REGISTRY.get_sample_value("noria_event_loop_lag_seconds_sum")
    task = asyncio.create_task(monitor_event_loop_lag())
    await asyncio.sleep(0.3)
    time.sleep(0.5)  # noqa: ASYNC251 - blocks on purpose
    await asyncio.sleep(0.01)
    task.cancel()
    assert REGISTRY.get_sample_value("noria_event_loop_lag_seconds_sum") - before >= 0.25
