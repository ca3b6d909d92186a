"""Waiting for what happens elsewhere, in another thread or another process: asked for again and again, so at once when it is there.

The bound says no more than that it will not happen any more. It is no claim about speed, so it is far above what any of this takes:
a machine that has other things to do must not fail a test.
"""

import asyncio
import contextlib
import time

TIMEOUT_S = 120.0
POLL_INTERVAL_S = 0.02


def wait_until(condition, timeout_s=TIMEOUT_S, ignoring=()):
    """What `condition()` is once that is true; where it raises one of `despite`, it is not true yet."""
    deadline = time.monotonic() + timeout_s
    while True:
        with contextlib.suppress(*ignoring):
            if found := condition():
                return found
        assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s"
        time.sleep(POLL_INTERVAL_S)


async def wait_until_async(condition, timeout_s=TIMEOUT_S):
    """The same, while the event loop goes on."""
    async with asyncio.timeout(timeout_s):
        while not (found := condition()):  # noqa: ASYNC110 - what is waited for happens elsewhere
            await asyncio.sleep(POLL_INTERVAL_S)
    return found
