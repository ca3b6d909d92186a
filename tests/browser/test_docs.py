"""The page /docs of a real server: its form, and accessibility."""

import pytest
from expect_on_page import expect

from noria.frontend.access.api_keys import generate_key
from noria.testing.server import running_server

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def key_and_table():
    return generate_key("alice")


@pytest.fixture(scope="module")
def url(key_and_table, tmp_path_factory):
    api_keys_file = tmp_path_factory.mktemp("keys") / "keys.toml"
    api_keys_file.write_text(key_and_table[1])
    with running_server(["bundled", "--slots", "2", "--api-keys-file", str(api_keys_file)]) as running:
        yield f"http://127.0.0.1:{running.port}"


def test_form_asks_for_a_key_and_generates(url, key_and_table, open_page):
    page = open_page(f"{url}/docs")
    page.get_by_label("JSON for POST /t2i").fill('{"prompt": "a green star", "inference_steps": 2, "seed": 7}')
    page.get_by_role("button", name="Generate").click()
    expect(page.get_by_label("API key")).to_be_focused()
    page.keyboard.type(key_and_table[0])
    page.keyboard.press("Enter")
    expect(page.get_by_role("img", name="The generated image")).to_be_visible()
    expect(page.locator("#status")).to_contain_text("seed 7")
    page.get_by_label("JSON for POST /t2i").fill('{"prompt": "a green star", "width": 1}')
    page.get_by_role("button", name="Generate").click()
    expect(page.locator("#status")).to_contain_text("width is 1")
    expect(page.get_by_role("img", name="The generated image")).to_be_hidden()
    open_page.ignore_logged(401)
    open_page.ignore_logged(400)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_is_accessible(url, open_page, check_accessibility, scheme):
    page = open_page(f"{url}/docs", color_scheme=scheme)
    check_accessibility(page)


def test_page_and_its_tables_fit_a_width_of_320_px(url, open_page, check_accessibility):
    page = open_page(f"{url}/docs", viewport={"width": 320, "height": 640})
    assert page.evaluate("document.documentElement.scrollWidth") == 320
    beyond = "[...document.querySelectorAll('td')].filter((cell) => cell.getBoundingClientRect().right > 320).length"
    assert page.evaluate(beyond) == 0
    expect(page.get_by_role("row").filter(has_text="inference_steps").first).to_contain_text("denoising steps")
    check_accessibility(page)
