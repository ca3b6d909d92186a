"""The start image and the painted mask of the playground, on a real server with the bundled model."""

import base64
import io
import json
import shutil

import httpx
import numpy as np
import pytest
from expect_on_page import expect
from PIL import Image, ImageDraw
from playground_page import TIMEOUT_MS, card, check_copied_code, file_of, generate, pixels, transfer

from noria.models.location import BUNDLED
from noria.testing.server import running_server

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

MAX_BYTES = 60_000
SIZE = (160, 128)
QUICK = {"prompt": "a green star", "inference_steps": 4, "seed": 3}


@pytest.fixture(scope="module")
def loras(tmp_path_factory):
    """An empty folder of LoRAs."""
    return tmp_path_factory.mktemp("loras")


@pytest.fixture(scope="module")
def server(loras):
    options = ["--slots", "4", "--max-image-bytes", str(MAX_BYTES), "--loras", str(loras)]
    with running_server(["bundled", *options, "--queue-limit-s", "600", "--hang-timeout-s", "600"]) as running:
        yield running


@pytest.fixture
def client(server):
    with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=120) as opened:
        yield opened


@pytest.fixture
def page(open_page, server):
    opened = open_page(f"http://127.0.0.1:{server.port}/", permissions=["clipboard-read", "clipboard-write"])
    return ready(opened)


def ready(page):
    page.set_default_timeout(TIMEOUT_MS)
    page.wait_for_selector("#generate:enabled")
    return page


def file_bytes(image, file_format="png", **options):
    file = io.BytesIO()
    image.save(file, format=file_format, **options)
    return file.getvalue()


def drawing(size=SIZE):
    image = Image.new("RGB", size, "white")
    ImageDraw.Draw(image).ellipse((40, 20, 110, 90), fill="red")
    return image


PHOTO = file_bytes(drawing())


def upload(name, content):
    return {"name": name, "mimeType": "image/png", "buffer": content}


def drop(page, name="photo.png", content=PHOTO, on="#prompt"):
    page.dispatch_event(on, "drop", {"dataTransfer": transfer(page, name, content)})
    expect(page.locator("#image-name")).to_have_text(name)


def paint(page, *points):
    """A stroke with the mouse through points, given as shares of the image's width and height."""
    box = page.locator("#painter-canvas").bounding_box()
    (x, y), *others = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in points]
    page.mouse.move(x, y)
    page.mouse.down()
    for other in others:
        page.mouse.move(*other, steps=5)
    page.mouse.up()


def test_only_what_is_painted_is_repainted(page, client, screenshot):
    drop(page)
    assert page.locator("#width").input_value() == "" == page.locator("#height").input_value()
    expect(page.locator("#controls")).to_be_hidden()  # there are no ControlNets
    page.get_by_role("button", name="Paint a mask").click()
    share = page.locator("#painter-share")
    page.fill("#painter-size", "60")
    paint(page, (0.75, 0.5), (0.75, 1.0))
    painted = share.inner_text()
    paint(page, (0.1, 0.1))
    assert share.inner_text() != painted
    page.get_by_role("button", name="Undo").click()
    assert share.inner_text() == painted
    page.get_by_role("button", name="Clear").click()
    expect(share).to_have_text("Nothing is painted yet.")
    page.keyboard.press("Control+z")
    assert share.inner_text() == painted
    page.get_by_role("button", name="Erase").click()
    paint(page, (0.75, 0.98))
    screenshot(page, "mask.png")
    page.get_by_role("button", name="Use the mask").click()
    expect(page.get_by_role("button", name="Paint on")).to_be_focused()

    with page.expect_request("**/t2i") as sent:
        generate(page, **QUICK, strength=1)
    card(page, "finished").wait_for()
    body = json.loads(sent.value.post_data)
    mask = np.asarray(Image.open(io.BytesIO(base64.b64decode(body["mask"].partition(",")[2]))).convert("L"))
    assert mask.shape == SIZE[::-1]
    assert mask[64, 120] == 255  # painted
    assert mask[127, 120] == 0  # and erased
    assert mask[20, 10] == 0  # and undone
    assert base64.b64decode(body["image"].partition(",")[2]) == PHOTO
    # With a black mask nothing is repainted: what the VAE makes of the photo.
    black = f"data:image/png;base64,{base64.b64encode(file_bytes(Image.new('L', SIZE))).decode()}"
    fields = {key: value for key, value in body.items() if key not in ("stream", "partial_images")}
    kept = pixels(client.post("/t2i", json=fields | {"mask": black}).content)
    changed = np.abs(pixels(file_of(page)) - kept).max(axis=2)
    far_left = changed[:, :56]  # the stroke's left edge is at 82; the VAE looks a little further
    assert far_left.max() <= 2
    assert changed[mask > 127].mean() > 20
    assert {"from photo.png", "with a mask", "strength 1"} <= set(page.locator(".facts li").all_inner_texts())


def test_a_generated_image_is_used_and_the_copied_code_makes_the_same_image(page, tmp_path):
    generate(page, **QUICK)
    card(page, "finished").wait_for()
    page.get_by_role("button", name="Use as start image: a green star, seed 3").click()
    expect(page.locator("#image-name")).to_have_text("noria-3.png")
    expect(page.locator("#image")).to_be_focused()
    page.fill("#prompt", "something else")
    page.get_by_role("button", name="Take its settings").click()
    expect(page.locator("#prompt")).to_have_value("a green star")
    white = Image.new("RGB", (128, 128))
    white.paste("white", (64, 0, 128, 128))
    page.set_input_files("#mask-file", upload("it's a mask.png", file_bytes(white)))
    expect(page.locator("#mask-name")).to_have_text("it's a mask.png")
    generate(page, prompt='a "red" \\ $HOME `x` circle', seed=4, strength=0.75, scheduler="euler")
    card(page, "finished", 1).wait_for()
    for name in ("noria-3.png", "it's a mask.png"):
        with page.expect_download() as download:
            page.locator(f'.generation a[download="{name}"]').first.click()
        download.value.save_as(tmp_path / name)
    check_copied_code(page, tmp_path)
    page.get_by_role("button", name="Remove", exact=True).first.click()
    expect(page.locator("#image-drop")).to_be_visible()
    assert page.locator("#width").input_value() == "128"
    page.locator(".generation").first.get_by_role("button", name="Reuse settings").click()
    expect(page.locator("#mask-name")).to_have_text("it's a mask.png")
    assert page.locator("#strength").input_value() == "0.75"


def test_a_pasted_image_is_the_start_image_and_a_pasted_text_is_a_text(page):
    page.evaluate(
        """async (text) => {
          const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
          await navigator.clipboard.write([new ClipboardItem({"image/png": new Blob([bytes], {type: "image/png"})})]);
        }""",
        base64.b64encode(PHOTO).decode(),
    )
    page.focus("#prompt")
    page.keyboard.press("Control+v")
    expect(page.locator("#image-size")).to_contain_text("160 × 128")
    page.evaluate("navigator.clipboard.writeText('a blue ring')")
    page.fill("#prompt", "")
    page.keyboard.press("Control+v")
    expect(page.locator("#prompt")).to_have_value("a blue ring")


def test_files_that_cannot_be_sent_are_said_before_they_are_and_the_servers_errors_after(page, open_page):
    sent = []
    page.on("request", lambda request: sent.append(request.url))
    error = page.locator("#image-error")
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (160, 160, 3), dtype=np.uint8))
    for name, content, text in (
        ("a.gif", file_bytes(drawing(), "gif"), "a.gif is no PNG, WebP or JPEG file."),
        ("b.png", PHOTO[:20], "b.png cannot be decoded: it is damaged, or not an image."),
        ("c.png", file_bytes(noise), "c.png has 77.1 kB; at most 60 kB are allowed."),
        (
            "d.png",
            file_bytes(Image.new("1", (16_400, 8))),
            "d.png has 16400 × 8 pixels; at most 16 megapixels and 16383",
        ),
    ):
        page.set_input_files("#image-file", upload(name, content))
        expect(error).to_contain_text(text)
        expect(page.locator("#image-chosen")).to_be_hidden()
    drop(page)
    expect(error).to_be_hidden()
    page.set_input_files("#mask-file", upload("mask.png", file_bytes(Image.new("L", (32, 32)))))
    expect(page.locator("#mask-error")).to_contain_text(
        "mask.png has 32 × 32 pixels; a mask has those of the image, 160 × 128."
    )
    assert not [url for url in sent if url.endswith("/t2i")]
    generate(page, inference_steps=4, strength=0.1)
    expect(page.locator("#strength-error")).to_contain_text("which leaves none of 4 inference_steps")
    expect(page.locator("#strength")).to_be_focused()
    frames = [drawing(), drawing().rotate(90)]
    drop(page, "moving.webp", file_bytes(frames[0], "webp", save_all=True, append_images=frames[1:]))
    generate(page, strength=0.8)
    expect(error).to_contain_text("image is damaged, or not supported")
    expect(page.locator(".generation")).to_have_count(0)
    open_page.ignore_logged(400)
    open_page.ignore_logged(422)


@pytest.mark.parametrize("width", [360, 1280])
def test_masks_are_painted_by_touch_and_by_keys(open_page, server, check_accessibility, width):
    url = f"http://127.0.0.1:{server.port}/"
    page = ready(open_page(url, has_touch=True, viewport={"width": width, "height": 740}))
    drop(page)
    check_accessibility(page)
    page.get_by_role("button", name="Paint a mask").click()
    canvas, share = page.locator("#painter-canvas"), page.locator("#painter-share")
    expect(canvas).to_be_focused()
    page.fill("#painter-size", "40")
    box = canvas.bounding_box()
    page.touchscreen.tap(box["x"] + box["width"] / 4, box["y"] + box["height"] / 2)
    expect(share).to_have_text("10 % is repainted.")  # a disc of 51.2 pixels
    check_accessibility(page)
    page.get_by_role("button", name="Undo").click()
    canvas.focus()
    for key in ("Space", "ArrowRight", "ArrowRight", "Space", "ArrowDown", "Control+Shift+ArrowDown"):
        page.keyboard.press(key)
    expect(share).to_have_text("23 % is repainted.")  # and 51.2 pixels further
    assert page.evaluate("document.documentElement.scrollWidth") == width
    page.get_by_role("button", name="Cancel").click()
    expect(page.locator("#mask-facts")).to_be_hidden()


def test_a_lora_that_came_later_is_offered(page, loras):
    lora_file = BUNDLED.with_name("bundled_loras") / "night.safetensors"
    expect(page.locator("#loras")).to_be_hidden()
    shutil.copy(lora_file, loras / "later.safetensors")
    page.evaluate("window.dispatchEvent(new Event('focus'))")
    page.get_by_role("button", name="Add a LoRA").click()
    field = page.get_by_label("Weight of the LoRA")
    assert (field.get_attribute("min"), field.get_attribute("max")) == ("-10", "10")
    shutil.copy(lora_file, loras / "latest.safetensors")
    page.get_by_role("button", name="Add a LoRA").click()
    expect(page.get_by_label("LoRA", exact=True).first.locator("option")).to_have_text(["later", "latest"])
    assert page.get_by_label("LoRA", exact=True).first.input_value() == "later"
