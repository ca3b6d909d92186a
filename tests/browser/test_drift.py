"""The page /drift, with made-up statistics of a server."""

import re

import pytest
from expect_on_page import expect

from frontends import folder, serving  # noqa: F401 - a fixture
from noria.config import Config
from noria.testing.fake_engine import FakeEngine
from sample_statistics import write_sample_statistics
from waiting import wait_until_ready

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


@pytest.fixture(scope="module")
def url(folder, data):  # noqa: F811 - a fixture
    with (
        FakeEngine(f"ipc://{folder}/drift") as engine,
        serving(Config(data_dir=str(data)), engine) as (address, _),
    ):
        wait_until_ready(address)
        yield address


@pytest.fixture
def open_drift(open_page, url, data):
    write_sample_statistics(data)
    return lambda query="", **options: open_page(f"{url}/drift{query}", **options)


def card(page, name):
    return page.locator(".variable").filter(has=page.get_by_role("heading", name=name, exact=True))


def test_a_shifted_variable_is_named_and_others_are_not(open_drift):
    page = open_drift()
    expect(page.locator("#page-status")).to_have_text("live")
    expect(page.get_by_label("Version")).to_have_value('["t2i","shapes@1"]')
    expect(page.locator("#summary")).to_have_text("6 variables are counted; shifted: prompt chars, prompt words.")
    words = card(page, "prompt words")
    expect(words.locator(".chip")).to_have_class(re.compile("bad"))
    expect(words.locator(".facts")).to_have_text(re.compile(r"^720 values, mean 1\d(\.\d)?, KS 0\.\d+, JS 0\.\d+ bit$"))
    expect(words.get_by_role("img")).to_have_count(3)
    expect(words).to_contain_text("Reference: shapes@1, 5000 values, chosen 2026-09-21 14:13 UTC by ada: a good day")
    expect(card(page, "scheduler").locator(".chip")).to_have_class(re.compile("good"))
    entropy = card(page, "image entropy")
    expect(entropy.locator(".chip")).to_have_text("no reference")
    expect(entropy).to_contain_text("noria stats baseline t2i")
    expect(entropy.get_by_role("img")).to_have_count(2)


def test_the_numbers_are_a_table(open_drift):
    page = open_drift()
    scheduler = card(page, "scheduler")
    scheduler.get_by_text("As a table").press("Enter")
    expect(scheduler.get_by_role("rowheader")).to_have_text(["ddim", "euler", "dpm++2m"])
    expect(scheduler.get_by_role("row").nth(1).get_by_role("cell").first).to_have_text(
        re.compile(r"^(5|6)\d(\.\d)? %$")
    )
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    expect(scheduler.get_by_role("table")).to_be_visible()


def test_another_version_is_chosen_by_keyboard_and_kept_in_the_address(open_drift):
    page = open_drift()
    expect(page.get_by_label("Version").get_by_role("option")).to_have_text(["shop · 0123456789ab", "t2i · shapes@1"])
    page.get_by_label("Version").focus()
    page.keyboard.press("ArrowUp")
    expect(page.locator("#summary")).to_have_text("1 variable is counted; none is compared with a reference.")
    expect(card(page, "price").locator(".facts")).to_have_text("30 values, mean 4.25")
    page.reload()
    expect(card(page, "price")).to_be_visible()


def test_without_statistics_it_says_how_to_count(open_drift, data):
    page = open_drift()
    expect(card(page, "price").or_(card(page, "scheduler"))).to_be_visible()
    (data / "statistics.json").unlink()
    page.reload()
    expect(page.locator("#nothing")).to_contain_text("--statistics-builtin prompts,parameters,images,texts")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_accessible_in_both_themes(open_drift, check_accessibility, screenshot, scheme):
    page = open_drift(color_scheme=scheme)
    expect(page.locator(".variable")).to_have_count(6)
    card(page, "scheduler").get_by_text("As a table").click()
    check_accessibility(page)
    screenshot(page, f"drift-{scheme}.png", full_page=True)


def test_it_fits_a_narrow_screen(open_drift, check_accessibility):
    page = open_drift(viewport={"width": 320, "height": 640})
    expect(page.locator(".variable")).to_have_count(6)
    assert page.evaluate("document.documentElement.scrollWidth") <= 320
    check_accessibility(page)
