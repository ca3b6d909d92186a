"""The ControlNets of the playground, on a real server with the bundled model and two random ones."""

import base64
import io
import json

import pytest
from expect_on_page import expect
from PIL import Image, ImageDraw
from playground_page import TIMEOUT_MS, card, check_copied_code, generate, transfer

import tiny_models
from noria.models.location import BUNDLED
from noria.testing.server import running_server

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder, channels = tmp_path_factory.mktemp("controlnets"), (8, 8, 12, 16)
    saved = [
        tiny_models.save_controlnet(folder / name, BUNDLED, conditioning_embedding_out_channels=channels)
        for name in ("depth", "edges")
    ]
    with running_server(["bundled", "--slots", "4", "--controlnets", ",".join(map(str, saved))]) as running:
        yield running


@pytest.fixture
def page(open_page, server):
    opened = open_page(f"http://127.0.0.1:{server.port}/", permissions=["clipboard-read", "clipboard-write"])
    opened.set_default_timeout(TIMEOUT_MS)
    opened.wait_for_selector("#generate:enabled")
    return opened


def drawing(shift=0):
    image = Image.new("RGB", (160, 128), "black")
    ImageDraw.Draw(image).ellipse((40 + shift, 20, 110 + shift, 90), outline="white", width=3)
    file = io.BytesIO()
    image.save(file, "png")
    return file.getvalue()


def drop(page, name, content, on="#control-add"):
    page.dispatch_event(on, "drop", {"dataTransfer": transfer(page, name, content)})
    expect(page.locator(".control a", has_text=name)).to_be_visible()


def test_images_steer_and_the_copied_code_makes_the_same_image(page, tmp_path, check_accessibility):
    drop(page, "it's a ring.png", drawing())
    drop(page, "other.png", drawing(9))
    page.locator(".control select").nth(0).select_option("edges")
    page.locator(".control [name=scale]").nth(0).fill("0.75")
    page.locator(".control [name=end]").nth(1).fill("0.5")
    drop(page, "other.png", drawing(20), on=".control:nth-child(2) img")  # in place of the one there
    expect(page.locator("#image-drop")).to_be_visible()  # it is no start image
    assert page.locator("#width").input_value() == ""
    check_accessibility(page)
    with page.expect_request("**/t2i") as sent:
        generate(page, prompt="a green star", inference_steps=4, seed=3)
    card(page, "finished").wait_for()
    controls = json.loads(sent.value.post_data)["controls"]
    assert [base64.b64decode(each.pop("image").partition(",")[2]) for each in controls] == [drawing(), drawing(20)]
    assert controls == [
        {"name": "edges", "scale": 0.75, "start": 0, "end": 1},
        {"name": "depth", "scale": 1, "start": 0, "end": 0.5},
    ]
    assert {"160 × 128", "ControlNet edges × 0.75", "ControlNet depth"} <= set(
        page.locator(".facts li").all_inner_texts()
    )
    for name, content in (("it's a ring.png", drawing()), ("control-1-other.png", drawing(20))):
        (tmp_path / name).write_bytes(content)
    check_copied_code(page, tmp_path)


def test_rows_are_removed_and_reused_and_errors_are_shown_at_them(page, open_page):
    for k in range(4):
        drop(page, f"{k}.png", drawing())
    expect(page.get_by_role("button", name="Choose a control image")).to_be_disabled()
    page.dispatch_event("#controls-hint", "drop", {"dataTransfer": transfer(page, "4.png", drawing())})
    expect(page.locator("#controls-error")).to_have_text("A request has at most 4 ControlNets: remove one.")
    for _ in range(3):
        page.get_by_role("button", name="Remove this ControlNet").first.click()
    expect(page.locator("#control-add")).to_be_focused()
    expect(page.locator("#controls-error")).to_be_hidden()
    page.dispatch_event("#controls-hint", "drop", {"dataTransfer": transfer(page, "a.gif", b"GIF89a")})
    expect(page.locator("#controls-error")).to_have_text("a.gif is no PNG, WebP or JPEG file.")
    page.locator(".control [name=start]").fill("0.8")
    page.locator(".control [name=end]").fill("0.2")
    generate(page, prompt="a green star", inference_steps=4, seed=3)
    expect(page.locator("#controls-error")).to_contain_text("0.2")
    open_page.ignore_logged(400)
    page.locator(".control [name=end]").fill("1")
    expect(page.locator("#controls-error")).to_be_hidden()
    generate(page)
    card(page, "finished").wait_for()
    page.get_by_role("button", name="Remove this ControlNet").click()
    expect(page.locator("#width")).to_have_value("128")
    page.get_by_role("button", name="Reuse settings").click()
    expect(page.locator(".control a")).to_have_text("3.png")
    assert page.locator(".control [name=start]").input_value() == "0.8"
