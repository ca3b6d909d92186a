"""Waits for what happens in another thread or process, by polling.

The time-out only says that it will never happen. It makes no claim about speed and is far above what anything here
takes, so that a busy machine fails no test.
"""

import asyncio
import contextlib
import time

TIMEOUT_S = 120.0
POLL_INTERVAL_S = 0.02


def wait_until(condition, timeout_s=TIMEOUT_S, ignoring=()):
    """Return the first true value of `condition()`; an exception of a type in `ignoring` counts as false."""
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(*ignoring):
            if found := condition():
                return found
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s"
        time.sleep(POLL_INTERVAL_S)


def wait_until_ready(address):
    """Wait until the server at `address` has an engine that is ready."""
    import httpx

    with httpx.Client(base_url=address, verify=False, timeout=60) as client:
        wait_until(lambda: client.get("/readyz").status_code == 200)


async def wait_until_async(condition, timeout_s=TIMEOUT_S):
    """Return the first true value of `condition()`, without blocking the event loop."""
    async with asyncio.timeout(timeout_s):
        while not (found := condition()):  # noqa: ASYNC110 - polls another thread or process
            await asyncio.sleep(POLL_INTERVAL_S)
    return found
