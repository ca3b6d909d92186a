"""Waiting for what happens elsewhere, in another thread or another process: asked for again and again, so at once when it is there.

The bound says no more than that it will not happen any more. It is no claim about speed, so it is far above what any of this takes:
a machine that has other things to do must not fail a test.
"""

import asyncio
import contextlib
import time

WITHIN_S = 120.0
EVERY_S = 0.02


def until(condition, seconds=WITHIN_S, despite=()):
    """What `condition()` is once that is true; where it raises one of `despite`, it is not true yet."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(*despite):
            if found := condition():
                return found
        assert time.monotonic() < deadline, f"not within {seconds:.0f} s"
        time.sleep(EVERY_S)


async def until_async(condition, seconds=WITHIN_S):
    """The same, while the event loop goes on."""
    async with asyncio.timeout(seconds):
        while not (found := condition()):  # noqa: ASYNC110 - what is waited for happens elsewhere
            await asyncio.sleep(EVERY_S)
    return found
