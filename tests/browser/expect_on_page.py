"""Playwright's `expect` with a time-out for busy machines, and control of a server's processes.

Playwright is imported when `expect` is called, because `make test` collects these modules without Playwright.
"""

import contextlib

from waiting import TIMEOUT_S

# Playwright's default of five seconds is too short for a browser on a busy machine.
TIMEOUT_MS = 1000 * TIMEOUT_S


def expect(target):
    """Playwright's assertions on a locator, a page or a response."""
    from playwright.sync_api import expect as playwright_expect

    playwright_expect.set_options(timeout=TIMEOUT_MS)
    return playwright_expect(target)


@contextlib.contextmanager
def suspended(process):
    """Suspend a process of a server, so that what happens meanwhile precedes what the process does next."""
    process.suspend()
    try:
        yield
    finally:
        process.resume()


def engine_of(server):
    """The process of the server's only engine."""
    (engine,) = server.children("engine")
    return engine
