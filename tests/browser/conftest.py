"""The pages in Debian's Chromium, driven by Playwright: `make test-browser`. A page that logs an error fails its test.

With NORIA_SCREENSHOTS set, `screenshot` writes the images of the documentation; else it only takes them.
"""

import os
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))  # the helpers of these tests are modules beside them

from expect_on_page import TIMEOUT_MS

IMAGES = pathlib.Path(__file__).parents[2] / "docs" / "images"


@pytest.fixture
def open_page(chromium):
    """Open a URL in a new tab: `open_page(url, color_scheme="dark", …)` takes the options of a Playwright context."""
    contexts, errors = [], []

    def open_tab(url, **options):
        context = chromium.new_context(
            **{"viewport": {"width": 1280, "height": 800}, "reduced_motion": "reduce"} | options
        )
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(f"uncaught: {error}"))
        page.on(
            "console", lambda message: errors.append(message.text) if message.type in ("error", "warning") else None
        )
        page.set_default_timeout(TIMEOUT_MS)
        page.goto(url)
        return page

    def ignore_logged(error, *, optional=False):
        """Ignore logged errors with this HTTP status or text; fail if there is none, unless `optional`."""
        text = error if isinstance(error, str) else f"status of {error}"
        expected = [each for each in errors if text in each]
        assert expected or optional, f"nothing was logged of {error}"
        errors[:] = [each for each in errors if each not in expected]

    open_tab.ignore_logged = ignore_logged
    yield open_tab
    for context in contexts:
        context.close()
    assert errors == [], "the page's console has errors"


@pytest.fixture
def check_accessibility():
    """Check a page with axe-core: WCAG 2.2 A and AA, and its best practices."""
    from axe_playwright_python.sync_playwright import Axe

    def check(page):
        found = Axe().run(page)
        assert found.violations_count == 0, found.generate_report()

    return check


@pytest.fixture
def screenshot():
    """Take a screenshot of a page and check that it is not blank."""

    def take(page, name, **options):
        path = IMAGES / name if os.environ.get("NORIA_SCREENSHOTS") else None
        assert len(page.screenshot(path=path, **options)) > 5_000

    return take
