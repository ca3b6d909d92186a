"""An event loop that is kept from its turns shows it."""

import asyncio
import time

from noria.frontend.http.event_loop_lag import monitor_event_loop_lag
from noria.observe.metrics.declarations import REGISTRY


def test_what_blocks_the_loop_is_seen():
    before = REGISTRY.get_sample_value("noria_event_loop_lag_seconds_sum")

    async def scenario():
        watching = asyncio.create_task(monitor_event_loop_lag())
        await asyncio.sleep(0.3)
        time.sleep(0.5)  # noqa: ASYNC251 - it blocks: that is the point
        await asyncio.sleep(0.01)
        watching.cancel()

    asyncio.run(scenario())
    assert REGISTRY.get_sample_value("noria_event_loop_lag_seconds_sum") - before >= 0.25
