"""The reference images of the playground, on a real server with a tiny FLUX.2 klein."""

import base64
import json

import numpy as np
import pytest
from expect_on_page import expect
from PIL import Image
from playground_page import TIMEOUT_MS, card, check_copied_code, generate
from test_start_images import file_bytes, upload

import tiny_models
from noria.testing.server import running_server

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

FILES = {
    name: file_bytes(Image.fromarray(np.random.default_rng(k).integers(0, 256, (64, 72 + 8 * k, 3), dtype=np.uint8)))
    for k, name in enumerate(["photo.png", "a $hat.png", "third.png", "fourth.png", "fifth.png"])
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tiny_models.save_flux_2_klein(tmp_path_factory.mktemp("klein") / "klein")
    options = ["--slots", "2", "--queue-limit-s", "600", "--hang-timeout-s", "600"]
    with running_server([str(folder), *options]) as running:
        yield running


def drop(page, *names):
    """Drop several files on the prompt."""
    dropped = page.evaluate_handle(
        """(files) => {
          const transfer = new DataTransfer();
          for (const [name, text] of files) {
            const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
            transfer.items.add(new File([bytes], name, {type: "image/png"}));
          }
          return transfer;
        }""",
        [[name, base64.b64encode(FILES[name]).decode()] for name in names],
    )
    page.dispatch_event("#prompt", "drop", {"dataTransfer": dropped})


def test_dropped_images_are_shown_to_the_model_and_the_code_makes_the_same_image(
    open_page, server, check_accessibility, tmp_path
):
    page = open_page(f"http://127.0.0.1:{server.port}/", permissions=["clipboard-read", "clipboard-write"])
    page.set_default_timeout(TIMEOUT_MS)
    page.wait_for_selector("#generate:enabled")
    chosen, error = page.locator("#references-chosen li"), page.locator("#reference_images-error")
    drop(page, "photo.png", "a $hat.png")
    expect(chosen).to_have_count(2)
    expect(page.locator("#image-chosen")).to_be_hidden()
    assert page.locator("#width").input_value() == ""
    check_accessibility(page)
    drop(page, "third.png", "fourth.png", "fifth.png")
    expect(error).to_contain_text("This model takes at most 4")
    for name in ("fourth.png", "third.png"):
        page.get_by_role("button", name=f"Remove {name}").click()
    expect(error).to_be_hidden()
    page.set_input_files("#references-file", upload("a.png", b"GIF89a"))
    expect(error).to_contain_text("a.png is no PNG, WebP or JPEG file.")
    expect(chosen).to_have_count(2)
    with page.expect_request("**/t2i") as sent:
        generate(page, prompt="a hat", inference_steps=2, seed=3)
    card(page, "finished").wait_for()
    body = json.loads(sent.value.post_data)
    assert [base64.b64decode(each.partition(",")[2]) for each in body["reference_images"]] == list(FILES.values())[:2]
    assert {"72 × 64", "reference photo.png", "reference a $hat.png"} <= set(
        page.locator(".facts li").all_inner_texts()
    )
    for name in list(FILES)[:2]:
        (tmp_path / name).write_bytes(FILES[name])
    check_copied_code(page, tmp_path)
    for name in list(FILES)[:2]:
        page.get_by_role("button", name=f"Remove {name}").click()
    page.get_by_role("button", name="Reuse settings").click()
    expect(chosen).to_have_count(2)
    page.set_input_files("#image-file", upload("fifth.png", FILES["fifth.png"]))
    page.set_input_files("#mask-file", upload("mask.png", file_bytes(Image.new("L", (104, 64), 255))))
    generate(page, prompt="a hat", inference_steps=2, seed=4)
    card(page, "finished", 1).wait_for()
    copies = page.locator(".generation").first.locator(".copies button")
    expect(copies).to_have_text(["curl", "Python"])  # openai's client would make a reference of the start image, too
