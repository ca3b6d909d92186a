"""How late a front end's event loop is: what keeps it from its turns keeps every caller of this process waiting."""

import asyncio

from noria.observe import metrics

_EVERY_S = 0.5


async def watch_lag() -> None:
    """Look twice a second, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + _EVERY_S
        await asyncio.sleep(_EVERY_S)
        metrics.EVENT_LOOP_LAG_SECONDS.observe(max(0.0, loop.time() - due))
