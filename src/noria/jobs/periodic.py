"""Background loops of a front end."""

import logging
from collections.abc import Awaitable, Callable

from noria.errors import JobsUnavailable

log = logging.getLogger("noria.jobs")


async def run_periodically(work: Callable[[], Awaitable[None]], pause: Callable[[], Awaitable[None]]) -> None:
    """Run `work`, then `pause`, until cancelled.

    Errors are logged and the loop goes on: a loop that ended would stall all jobs.
    """
    while True:
        try:
            await work()
        except JobsUnavailable as error:
            log.debug("%s", error.message)  # the offloader logged why, once a minute
        except Exception:
            log.exception("a background task of jobs failed; it will be retried")
        await pause()
