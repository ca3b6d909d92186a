"""What is done again and again, for as long as a front end lives."""

import logging
from collections.abc import Awaitable, Callable

from noria.errors import JobsUnavailable

log = logging.getLogger("noria.jobs")


async def run_periodically(work: Callable[[], Awaitable[None]], pause: Callable[[], Awaitable[None]]) -> None:
    """Do `work`, then `pause`, until cancelled. What goes wrong is logged and tried again: jobs would wait for ever otherwise."""
    while True:
        try:
            await work()
        except JobsUnavailable as error:
            log.warning("%s (%s)", error.message, error.__cause__)
        except Exception:
            log.exception("work on jobs broke; it is tried again")
        await pause()
