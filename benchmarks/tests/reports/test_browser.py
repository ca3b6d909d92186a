"""The HTML page in headless Chromium, without a network: `make test-browser`."""

import pytest
from synthetic_runs import full_suite

from noria_bench.reports.writer import write_report

pytestmark = pytest.mark.browser

_SIZES = (
    "[...document.querySelectorAll('figure svg')]"
    ".map(svg => [svg.getBoundingClientRect().width, svg.getBoundingClientRect().height])"
)
_DRAWN = (
    "[...document.querySelectorAll('figure svg')].map(svg => [...svg.querySelectorAll('path, use')]"
    ".filter(shape => shape.getBoundingClientRect().width > 0).length)"
)
_BROKEN_USES = (
    "[...document.querySelectorAll('use')].filter(use => !document.getElementById(use.href.baseVal.slice(1))).length"
)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """The report of a whole suite."""
    return write_report(tmp_path_factory.mktemp("report"), full_suite())


@pytest.fixture(scope="module")
def page(report, chromium):
    """The open report; `requests` are those that it sent, `messages` those of its console."""
    with chromium.new_context(offline=True) as context:
        page = context.new_page()
        page.requests, page.messages = [], []
        page.on("request", lambda request: page.requests.append(request.url))
        page.on("console", lambda message: page.messages.append(message.text))
        page.on("pageerror", lambda error: page.messages.append(str(error)))
        page.goto(report[1].as_uri())
        yield page


def test_the_page_makes_no_network_request(page, report):
    assert page.requests == [report[1].as_uri()]


def test_the_console_has_no_errors(page):
    assert page.messages == []


def test_there_is_a_heading_for_each_bench(page):
    assert page.evaluate("[...document.querySelectorAll('h1')].map(h => h.textContent)") == ["Noria bench report"]
    assert page.evaluate("[...document.querySelectorAll('h2')].map(h => h.textContent)") == [
        "Overview",
        "Scenario 1: one user",
        "Scenario 2: users who arrive one by one",
        "Mixed traffic, bursty arrivals",
        "Mixed traffic, poisson arrivals",
        "Sweep: attention",
        "Sweep: batching",
        "Sweep: channels-last",
        "Sweep: slots",
        "Raw summaries",
    ]


def test_every_table_has_its_rows(page):
    rows = page.evaluate("[...document.querySelectorAll('table')].map(table => table.tBodies[0].rows.length)")
    assert rows == [9] + [9, 5, 9] * 2 + [9, 9] * 2 + [3, 4, 3] + [5, 5, 5] + [4, 2, 4] + [3, 3]


def test_every_plot_is_drawn(page, report):
    sizes, drawn = page.evaluate(_SIZES), page.evaluate(_DRAWN)
    assert len(sizes) == len(drawn) == len(report) - 2 == 17
    assert all(width > 300 and height > 100 for width, height in sizes)
    assert all(shapes > 30 for shapes in drawn)
    assert page.evaluate(_BROKEN_USES) == 0  # a missing glyph would be a gap


def test_links_lead_to_existing_sections(page):
    assert page.evaluate(
        "[...document.querySelectorAll('nav a')].every(link => document.getElementById(link.hash.slice(1)))"
    )


def test_the_pages_width_is_the_windows(page):
    for width in (1200, 480):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_it_follows_the_colour_scheme(page):
    def paper(scheme):
        page.emulate_media(color_scheme=scheme)
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    assert (paper("light"), paper("dark")) == ("rgb(253, 253, 252)", "rgb(22, 24, 26)")
    assert (
        page.evaluate("getComputedStyle(document.querySelector('figure svg')).backgroundColor") == "rgb(255, 255, 255)"
    )
