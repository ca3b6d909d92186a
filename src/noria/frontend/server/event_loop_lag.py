"""Measures how late the event loop runs its callbacks. Lag delays every client of the process."""

import asyncio

from noria.observe.metrics import declarations

_INTERVAL_S = 0.5


async def monitor_event_loop_lag() -> None:
    """Observe the lag twice a second, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        expected_at = loop.time() + _INTERVAL_S
        await asyncio.sleep(_INTERVAL_S)
        declarations.EVENT_LOOP_LAG_SECONDS.observe(max(0.0, loop.time() - expected_at))
