"""What pages are expected to become, and time for it, on a machine that does other things besides.

Playwright's `expect` is looked up when it is called: `make test` collects these modules where Playwright is not installed.
"""

import contextlib

from waiting import TIMEOUT_S

WITHIN_MS = 1000 * TIMEOUT_S  # Playwright's own five seconds are no more than a busy machine may stop a browser for


def expect(what):
    """What a locator, a page or an answer is expected to become."""
    from playwright.sync_api import expect as playwrights

    playwrights.set_options(timeout=WITHIN_MS)
    return playwrights(what)


@contextlib.contextmanager
def held(process):
    """Stop a server's process: what is done meanwhile comes before whatever it does next, however slow or quick the machine is."""
    process.suspend()
    try:
        yield
    finally:
        process.resume()


def engine_of(server):
    """The process of its only engine."""
    (engine,) = server.children("engine")
    return engine
