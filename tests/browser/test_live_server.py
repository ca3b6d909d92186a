"""The page /live of a real server with the bundled model: requests with different settings in one batch."""

import concurrent.futures
import os
import re

import httpx
import pytest
from expect_on_page import engine_of, expect, suspended

from noria.testing.server import running_server
from waiting import TIMEOUT_S, wait_until

pytestmark = pytest.mark.browser

PROMPTS = [
    "a red circle above a blue square",
    "a green star left of a yellow triangle",
    "a blue ring below a red cross",
    "a purple square",
]
# Long enough to run together and to be seen, also on a busy machine.
QUICK = {"prompt": PROMPTS[0], "scheduler": "euler", "inference_steps": 80, "guidance_scale": 1}
LONG = {"prompt": "a green star", "scheduler": "heun", "inference_steps": 140, "width": 96, "deadline_ms": 600_000}


@pytest.fixture(scope="module")
def server():
    with running_server(["bundled", "--slots", "8", "--queue-limit-s", "600", "--hang-timeout-s", "600"]) as running:
        yield running


@pytest.fixture(scope="module")
def url(server):
    return f"http://127.0.0.1:{server.port}"


@pytest.fixture
def send(url):
    """Send a request in a thread, at most twelve at once; those that were not sent at the end are dropped."""
    with (
        httpx.Client(base_url=url, timeout=TIMEOUT_S) as client,
        concurrent.futures.ThreadPoolExecutor(12) as pool,
    ):
        yield lambda body: pool.submit(client.post, "/t2i", json=body)
        pool.shutdown(cancel_futures=True)


def test_requests_with_different_settings_share_the_batch_and_leave_one_by_one(url, send, open_page):
    page = open_page(f"{url}/live")
    expect(page.locator(".batch-summary")).to_contain_text("Nothing is running.")
    page.evaluate(NOTED)
    long = send(LONG)
    heun = page.get_by_role("button", name=re.compile(r"Slot \d: heun, 279 calls, 96 × 128 px"))
    expect(heun).to_be_visible()
    quick = send(QUICK)
    page.wait_for_function(HAS_THUMBNAILS, arg=1)
    # The second request has fewer steps and leaves first: it did not wait for the other.
    departures = page.locator(".departures li")
    heun_left, euler_left = (re.compile(rf"{what} steps, from slot \d: ok") for what in ("heun, 140", "euler, 80"))
    expect(departures).to_have_text([heun_left, euler_left])
    assert [long.result().status_code, quick.result().status_code] == [200, 200]
    noted = page.evaluate("noted")
    assert any(text.startswith("Running: 2 requests, 2 schedulers, 80–140 steps, 2 sizes.") for text in noted)
    assert any(re.match(r"Slot \d: euler, 80 calls, 128 × 128 px, guidance 1", text) for text in noted)
    expect(page.get_by_role("button", name=re.compile(r"Slot \d: free"))).to_have_count(8)


NOTED = """() => {
  // All texts that the page shows: on a fast machine they change before the test reads them.
  window.noted = [];
  const note = () => {
    noted.push(document.querySelector(".batch-summary").textContent);
    for (const slot of document.querySelectorAll(".slot")) noted.push(slot.getAttribute("aria-label"));
  };
  new MutationObserver(note).observe(document.querySelector(".batch"), { subtree: true, childList: true, characterData: true });
}"""


HAS_THUMBNAILS = """(minimum) => {
  // Whether at least `minimum` circles have many colours, as thumbnails have; a disc with a number has about a hundred.
  const ring = document.querySelector(".slot-ring"), canvas = new OffscreenCanvas(ring.width, ring.height);
  const context = canvas.getContext("2d", { willReadFrequently: true }), box = ring.getBoundingClientRect(), ratio = canvas.width / box.width;
  context.drawImage(ring, 0, 0);
  return [...document.querySelectorAll(".slot")].filter((slot) => {
    const { left, top, width } = slot.getBoundingClientRect(), size = parseFloat(getComputedStyle(slot).getPropertyValue("--size"));
    const at = [left + width / 2 - size / 4 - box.left, top + size / 4 - box.top, size / 2, size / 2].map((px) => Math.round(px * ratio));
    const { data } = context.getImageData(...at);
    return new Set(new Uint32Array(data.buffer)).size > 200;
  }).length >= minimum;
}"""


FILLED = """() => {
  // Whether the timeline has bars at its left end: its rows are grey, bars are coloured.
  const bars = document.querySelector(".bars"), ratio = bars.width / bars.getBoundingClientRect().width, canvas = new OffscreenCanvas(bars.width, bars.height);
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.drawImage(bars, 0, 0);
  const { data } = context.getImageData(Math.round(34 * ratio), 0, 1, canvas.height);
  const coloured = Array.from({ length: data.length / 4 }, (_, k) => data.slice(4 * k, 4 * k + 3)).filter((rgb) => Math.max(...rgb) - Math.min(...rgb) > 50);
  return coloured.length > canvas.height / 2;
}"""


def test_disconnected_client_leaves_the_batch(url, open_page):
    page = open_page(f"{url}/live")
    with httpx.stream("POST", f"{url}/t2i", json=LONG | {"stream": True}, timeout=TIMEOUT_S):
        expect(page.get_by_role("button", name=re.compile(r"Slot \d: heun"))).to_be_visible()
    expect(page.locator(".departures li")).to_have_text(re.compile(r"heun, 140 steps, from slot \d: cancelled"))
    expect(page.get_by_role("button", name=re.compile(r"Slot \d: free"))).to_have_count(8)


def test_sample_traffic_fills_the_batch(url, server, open_page):
    page = open_page(f"{url}/live")
    expect(page.locator(".batch-summary")).to_contain_text("Nothing is running.")
    page.evaluate(NOTED)
    with suspended(engine_of(server)):  # a fast engine would finish each request before the next one
        page.get_by_role("button", name="Send sample traffic").click()
        expect(page.locator("#sample-status")).to_contain_text("5 of 20 requests sent")
    mixed = re.compile(r"[3-5] requests, [3-5] schedulers")
    wait_until(lambda: any(mixed.search(text) for text in page.evaluate("noted")))
    page.get_by_role("button", name="Stop sample traffic").click()
    expect(page.get_by_role("button", name=re.compile(r"Slot \d: free"))).to_have_count(8)
    open_page.ignore_logged(429, optional=True)  # a busy machine may reject some


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_mixed_traffic_is_shown_and_accessible(url, send, open_page, check_accessibility, screenshot, scheme):
    page = open_page(f"{url}/live", color_scheme=scheme, viewport={"width": 1280, "height": 840})
    schedulers = ["euler", "dpm++2m-karras", "ddim", "unipc", "euler-a", "dpm++2m", "pndm"]
    steps = [9, 24, 6, 15, 30, 8, 20, 12, 5, 18]
    for k in range(1000):  # more than will run: there is a queue until the end of the test
        body = {"prompt": PROMPTS[k % 4], "scheduler": schedulers[k % 7], "inference_steps": steps[k % 10], "seed": k}
        send(body | ({"deadline_ms": 60_000} if k % 5 == 3 else {}))
    expect(page.locator(".departures li").nth(8)).to_be_visible()
    takes_screenshots = bool(os.environ.get("NORIA_SCREENSHOTS"))
    if takes_screenshots:  # takes as long as the timeline
        page.wait_for_function(FILLED)
    expect(page.locator(".queue li").nth(1)).to_be_visible()
    expect(page.locator(".deadline:not(:empty)").first).to_be_visible()
    # On a busy machine the page asks for few views, and short images leave before one shows them.
    page.wait_for_function(HAS_THUMBNAILS, arg=7 if takes_screenshots else 3)
    screenshot(page, f"live-{scheme}.png")
    page.get_by_role("button", name="Pause").click()
    check_accessibility(page)
