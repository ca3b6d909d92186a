"""The refiner on the playground, on a real server with small models of SDXL."""

import httpx
import numpy as np
import pytest
from playground_page import TIMEOUT_MS, card, file_of, generate, pixels

from noria.testing.server import running_server

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def server(tiny_xl_folder, tiny_refiner_folder):
    options = ["--slots", "2", "--threads", "1", "--refiners", str(tiny_refiner_folder)]
    with running_server([str(tiny_xl_folder), *options, "--hang-timeout-s", "600"]) as running:
        yield running


def test_the_refiner_is_chosen_shown_and_reused(open_page, server, check_accessibility):
    page = open_page(f"http://127.0.0.1:{server.port}/")
    page.set_default_timeout(TIMEOUT_MS)
    page.wait_for_selector("#generate:enabled")
    page.get_by_label("Refiner from").fill("0.5")
    check_accessibility(page)
    generate(page, prompt="a green star", inference_steps=6, seed=5)
    card(page, "finished").wait_for()
    assert "refined from 0.5" in card(page, "finished").inner_text()
    body = {"prompt": "a green star", "inference_steps": 6, "seed": 5}
    with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=120) as client:
        refined, plain = (client.post("/t2i", json=body | more) for more in ({"refiner": {"start": 0.5}}, {}))
    assert np.abs(pixels(file_of(page)) - pixels(refined.content)).max() <= 1
    assert np.abs(pixels(plain.content) - pixels(refined.content)).max() > 1
    page.get_by_label("Refiner from").fill("")
    page.click("button:text-is('Reuse settings')")
    assert page.get_by_label("Refiner from").input_value() == "0.5"
    page.get_by_label("Refiner from").fill("1")
    page.click("#generate")
    page.locator("#refiner-error", has_text="its start is 1.0").wait_for()
    open_page.ignore_logged(400)
