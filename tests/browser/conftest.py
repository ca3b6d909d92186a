"""Pages in Debian's Chromium, driven by Playwright: `make test-browser`. A page that logs an error fails its test.

With NORIA_SCREENSHOTS set, `picture` writes the pictures of the documentation; else it only takes them.
"""

import os
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))  # what the tests share stands beside them, not in a package

from expecting import WITHIN_MS

IMAGES = pathlib.Path(__file__).parents[2] / "docs" / "images"


@pytest.fixture
def open_page(chromium):
    """Open a URL in a tab of its own; `open_page(url, color_scheme="dark", …)` takes Playwright's options of a context."""
    contexts, errors = [], []

    def open_it(url, **options):
        context = chromium.new_context(
            **{"viewport": {"width": 1280, "height": 800}, "reduced_motion": "reduce"} | options
        )
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(f"uncaught: {error}"))
        page.on(
            "console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None
        )
        page.set_default_timeout(WITHIN_MS)
        page.goto(url)
        return page

    def forgive(what, *, perhaps=False):
        """Take out what Chromium logs of answers with this status, or of this error, which the test has provoked, or `perhaps` has."""
        words = what if isinstance(what, str) else f"status of {what}"
        told = [error for error in errors if words in error]
        assert told or perhaps, f"nothing was logged of {what}"
        errors[:] = [error for error in errors if error not in told]

    open_it.forgive = forgive
    yield open_it
    for context in contexts:
        context.close()
    assert errors == [], "the page's console has errors"


@pytest.fixture
def check_accessibility():
    """Fail on what axe-core finds in a page, WCAG 2.2 A and AA and its best practices."""
    from axe_playwright_python.sync_playwright import Axe

    def check(page):
        found = Axe().run(page)
        assert found.violations_count == 0, found.generate_report()

    return check


@pytest.fixture
def picture():
    """Take a picture of a page, and see that it is not blank."""

    def take(page, name, **options):
        path = IMAGES / name if os.environ.get("NORIA_SCREENSHOTS") else None
        assert len(page.screenshot(path=path, **options)) > 5_000

    return take
