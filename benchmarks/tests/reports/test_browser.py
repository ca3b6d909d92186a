"""The page in headless Chromium, without a network: `make test-browser`."""

import pytest
from planted import full_suite

from noria_bench.reports.writer import write_report

pytestmark = pytest.mark.browser

_SIZES = "[...document.querySelectorAll('figure svg')].map(svg => [svg.getBoundingClientRect().width, svg.getBoundingClientRect().height])"
_DRAWN = "[...document.querySelectorAll('figure svg')].map(svg => [...svg.querySelectorAll('path, use')].filter(shape => shape.getBoundingClientRect().width > 0).length)"
_BROKEN_USES = (
    "[...document.querySelectorAll('use')].filter(use => !document.getElementById(use.href.baseVal.slice(1))).length"
)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A whole suite's, with its runs' files left out."""
    return write_report(tmp_path_factory.mktemp("report"), full_suite())


@pytest.fixture(scope="module")
def page(report, chromium):
    """The report, open; `asked` is what it asked for, and `said` what its console had to say."""
    with chromium.new_context(offline=True) as context:
        page = context.new_page()
        page.asked, page.said = [], []
        page.on("request", lambda request: page.asked.append(request.url))
        page.on("console", lambda message: page.said.append(message.text))
        page.on("pageerror", lambda error: page.said.append(str(error)))
        page.goto(report[1].as_uri())
        yield page


def test_the_page_asks_the_network_for_nothing(page, report):
    assert page.asked == [report[1].as_uri()]


def test_the_console_has_no_errors(page):
    assert page.said == []


def test_there_is_a_heading_for_each_bench(page):
    assert page.evaluate("[...document.querySelectorAll('h1')].map(h => h.textContent)") == ["Noria bench report"]
    assert page.evaluate("[...document.querySelectorAll('h2')].map(h => h.textContent)") == [
        "At a glance",
        "Scenario 1: one user",
        "Scenario 2: users who arrive one by one",
        "Mixed traffic, bursty arrivals",
        "Mixed traffic, poisson arrivals",
        "Sweep: attention",
        "Sweep: batching",
        "Sweep: channels-last",
        "Sweep: slots",
        "Raw figures",
    ]


def test_every_table_is_there_with_its_rows(page):
    rows = page.evaluate("[...document.querySelectorAll('table')].map(table => table.tBodies[0].rows.length)")
    assert rows == [9] + [9, 5, 9] * 2 + [9, 9] * 2 + [3, 4, 3] + [5, 5, 5] + [4, 2, 4] + [3, 3]


def test_every_picture_is_drawn(page, report):
    sizes, drawn = page.evaluate(_SIZES), page.evaluate(_DRAWN)
    assert len(sizes) == len(drawn) == len(report) - 2 == 17
    assert all(width > 300 and height > 100 for width, height in sizes)
    assert all(shapes > 30 for shapes in drawn)
    assert page.evaluate(_BROKEN_USES) == 0  # a glyph that is not found would be a gap


def test_links_lead_to_their_sections(page):
    assert page.evaluate(
        "[...document.querySelectorAll('nav a')].every(link => document.getElementById(link.hash.slice(1)))"
    )


def test_the_pages_width_is_the_windows(page):
    for width in (1200, 480):
        page.set_viewport_size({"width": width, "height": 900})
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_it_is_dark_for_who_likes_it_dark(page):
    def paper(scheme):
        page.emulate_media(color_scheme=scheme)
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    assert (paper("light"), paper("dark")) == ("rgb(253, 253, 252)", "rgb(22, 24, 26)")
    assert (
        page.evaluate("getComputedStyle(document.querySelector('figure svg')).backgroundColor") == "rgb(255, 255, 255)"
    )
