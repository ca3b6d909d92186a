"""The playground and the sample traffic of a model for inpainting, on a real server with such a model."""

import base64
import io
import json

import httpx
import numpy as np
import pytest
from expect_on_page import expect
from PIL import Image
from playground_page import TIMEOUT_MS, card, generate, pixels

import tiny_models
from noria.testing.server import running_server

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tiny_models.save_stable_diffusion(
        tmp_path_factory.mktemp("models") / "repaint",
        unet=tiny_models.INPAINTING_UNET,
        pipeline="StableDiffusionInpaintPipeline",
    )
    options = ["--slots", "4", "--queue-limit-s", "600", "--hang-timeout-s", "600"]
    with running_server([str(folder), "--additional-models", "bundled", *options]) as running:
        yield running


@pytest.fixture
def page(open_page, server):
    opened = open_page(f"http://127.0.0.1:{server.port}/")
    opened.set_default_timeout(TIMEOUT_MS)
    opened.wait_for_selector("#generate:enabled")
    return opened


def file_bytes(image):
    file = io.BytesIO()
    image.save(file, format="png")
    return file.getvalue()


def test_nothing_is_sent_before_there_is_an_image_and_a_mask(page, server, check_accessibility):
    sent = []
    page.on("request", lambda request: sent.append(request) if request.url.endswith("/t2i") else None)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 48, 3), dtype=np.uint8))
    expect(page.locator("#image-needed")).to_be_visible()
    expect(page.locator("#first-command")).to_contain_text("$(base64 < 'mask.png'")  # with a prompt alone it would fail
    generate(page, prompt="a ring", inference_steps=2, seed=3)
    expect(page.locator("#image-error")).to_have_text("repaint repaints a part of an image: choose one.")
    expect(page.locator("#image")).to_be_focused()
    page.set_input_files("#image-file", {"name": "a.png", "mimeType": "image/png", "buffer": file_bytes(image)})
    expect(page.locator("#mask-none")).to_be_hidden()
    assert page.locator("#strength").input_value() == "1"
    page.click("#generate")
    expect(page.locator("#mask-error")).to_contain_text("Paint what repaint is to repaint")
    check_accessibility(page)
    assert sent == []
    page.get_by_role("button", name="Paint a mask").click()
    page.locator("#painter-canvas").click()
    page.click("#painter-use")
    expect(page.locator("#mask-error")).to_be_hidden()
    page.click("#generate")
    card(page, "finished").wait_for()
    body = json.loads(sent[0].post_data)
    assert (body["model"], body["strength"], len(sent)) == ("repaint", 1, 1)
    answer = httpx.post(f"http://127.0.0.1:{server.port}/t2i", json=body | {"stream": False, "partial_images": 0})
    mask = Image.open(io.BytesIO(base64.b64decode(body["mask"].partition(",")[2])))
    assert (pixels(answer.content).shape, mask.size) == ((32, 48, 3), (48, 32))
    page.locator("#model").select_option("noria-shapes")
    expect(page.locator("#mask-none")).to_be_visible()
    expect(page.locator("#image-needed")).to_be_hidden()


def test_sample_traffic_brings_a_mask(open_page, server):
    page = open_page(f"http://127.0.0.1:{server.port}/live")
    expect(page.locator("#curl")).to_contain_text("$(base64 < 'mask.png'")  # with a prompt alone it would fail
    page.get_by_role("button", name="Send sample traffic").click()
    with page.expect_response(lambda response: response.url.endswith("/t2i"), timeout=TIMEOUT_MS) as response:
        assert response.value.status == 200
    body = json.loads(response.value.request.post_data)
    image, mask = (Image.open(io.BytesIO(base64.b64decode(body[name].partition(",")[2]))) for name in ("image", "mask"))
    assert image.size == mask.size == (32, 32)
    assert [mask.convert("L").getpixel((5, y)) for y in (15, 16)] == [0, 255]
    page.get_by_role("button", name="Stop sample traffic").click()
    open_page.ignore_logged(429, optional=True)
