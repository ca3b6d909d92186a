"""Playwright's `expect`, looked up when it is called: `make test` collects these modules where Playwright is not installed."""


def expect(what):
    """What a locator, a page or an answer is expected to become."""
    from playwright.sync_api import expect as playwrights

    return playwrights(what)
