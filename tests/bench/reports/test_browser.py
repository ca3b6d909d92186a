"""The page in headless Chromium, without a network: `make test-browser`."""

import pytest
from planted import realistic

import browser
from noria.bench.reports.writing import write

pytestmark = pytest.mark.browser

_SIZES = "[...document.querySelectorAll('figure svg')].map(svg => [svg.getBoundingClientRect().width, svg.getBoundingClientRect().height])"
_DRAWN = "[...document.querySelectorAll('figure svg')].map(svg => [...svg.querySelectorAll('path, use')].filter(shape => shape.getBoundingClientRect().width > 0).length)"
_BROKEN_USES = (
    "[...document.querySelectorAll('use')].filter(use => !document.getElementById(use.href.baseVal.slice(1))).length"
)


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """A whole suite's, with its runs' files left out."""
    if browser.find() is None:
        pytest.fail(f"none of {', '.join(browser.NAMES)} is installed; apt-get install chromium")
    return write(tmp_path_factory.mktemp("report"), realistic())


@pytest.fixture(scope="module")
def tab(report):
    """The report, open."""
    with browser.chromium() as tab:
        tab.open(report[1].as_uri())
        yield tab


def test_the_page_asks_the_network_for_nothing(tab, report):
    asked = [event["request"]["url"] for event in tab.of("Network.requestWillBeSent")]
    assert asked == [report[1].as_uri()]


def test_the_console_has_no_errors(tab):
    assert tab.of("Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled") == []


def test_there_is_a_heading_for_each_bench(tab):
    assert tab.ask("[...document.querySelectorAll('h1')].map(h => h.textContent)") == ["Noria bench report"]
    assert tab.ask("[...document.querySelectorAll('h2')].map(h => h.textContent)") == [
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


def test_every_table_is_there_with_its_rows(tab):
    rows = tab.ask("[...document.querySelectorAll('table')].map(table => table.tBodies[0].rows.length)")
    assert rows == [9] + [9, 5, 9] * 2 + [9, 9] * 2 + [3, 4, 3] + [5, 5, 5] + [4, 2, 4] + [3, 3]


def test_every_picture_is_drawn(tab, report):
    sizes, drawn = tab.ask(_SIZES), tab.ask(_DRAWN)
    assert len(sizes) == len(drawn) == len(report) - 2 == 17
    assert all(width > 300 and height > 100 for width, height in sizes)
    assert all(shapes > 30 for shapes in drawn)
    assert tab.ask(_BROKEN_USES) == 0  # a glyph that is not found would be a gap


def test_links_lead_to_their_sections(tab):
    assert tab.ask("[...document.querySelectorAll('nav a')].every(link => document.getElementById(link.hash.slice(1)))")


def test_the_pages_width_is_the_windows(tab):
    for width in (1200, 480):
        tab.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        assert tab.ask("document.documentElement.scrollWidth") <= width


def test_it_is_dark_for_who_likes_it_dark(tab):
    def paper(scheme):
        tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        return tab.ask("getComputedStyle(document.body).backgroundColor")

    assert (paper("light"), paper("dark")) == ("rgb(253, 253, 252)", "rgb(22, 24, 26)")
    assert tab.ask("getComputedStyle(document.querySelector('figure svg')).backgroundColor") == "rgb(255, 255, 255)"
