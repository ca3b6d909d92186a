"""The playground, used as people use it, before a real server with the bundled model."""

import base64
import io
import os
import re
import subprocess
import sys

import httpx
import numpy as np
import pytest
from expecting import engine_of, expect, held
from PIL import Image

from noria.frontend.http.api_keys import generate_key
from noria_bench.targets.server import running_server
from waiting import wait_until

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

PATIENCE_MS = 240_000  # two cores, shared with whatever else is tested
ODD = 'it\'s a "red" \\ circle, $HOME `x` 星\nabove a blue square'
# What takes longest, so that it is still drawn whatever a test does meanwhile; it is cancelled in the end.
LONG = {"inference_steps": 200, "scheduler": "heun"}
PATIENT = ["--queue-limit-s", "600", "--hang-timeout-s", "600"]  # with an engine that is held
BIG_SEED = "4611686018427387905"  # 2^62 + 1: JavaScript's numbers end at 2^53


@pytest.fixture(scope="module")
def server():
    with running_server(["bundled", "--slots", "4", *PATIENT]) as running:
        yield running


@pytest.fixture
def client(server):
    with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=120, verify=False) as opened:
        yield opened


@pytest.fixture
def playground(open_page, server):
    """Open the page, ready to draw."""

    def open_it(port=None, **options):
        page = open_page(f"http://127.0.0.1:{port or server.port}/", **options)
        page.set_default_timeout(PATIENCE_MS)
        page.wait_for_selector("#draw:enabled")
        return page

    return open_it


def draw(page, **settings):
    """Write `settings` into the form and press Draw."""
    for name, value in settings.items():
        field = page.locator(f"#{name}")
        if field.evaluate("field => field.tagName") == "SELECT":
            field.select_option(value)
        else:
            field.fill(str(value))
    page.click("#draw")


def card(page, state, number=0):
    return page.locator(f'.drawing[data-state="{state}"]').nth(number)


def metric(client, name):
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.split("{")[0].split(" ")[0] == name)


def pixels(data):
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB")).astype(int)


def file_of(page, image="img.final"):
    """The bytes of an image on the page."""
    text = page.locator(image).first.evaluate(
        """async (image) => {
          const canvas = document.createElement("canvas");
          [canvas.width, canvas.height] = [image.naturalWidth, image.naturalHeight];
          canvas.getContext("2d").drawImage(image, 0, 0);
          return canvas.toDataURL("image/png");
        }"""
    )
    return base64.b64decode(text.partition(",")[2])


# ── Drawing ─────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_an_image_forms_before_ones_eyes_and_ends_in_the_gallery(playground, client):
    page = playground()
    page.evaluate(
        """() => {
          window.seen = {previews: new Set(), steps: new Set(), words: new Set()};
          new MutationObserver(() => {
            for (const image of document.querySelectorAll(".preview")) window.seen.previews.add(image.dataset.step);
            const bar = document.querySelector("progress");
            if (bar?.position > 0) window.seen.steps.add(bar.value);
            const where = document.querySelector(".where");
            if (where) window.seen.words.add(where.textContent);
          }).observe(document.querySelector("#drawings"), {subtree: true, childList: true, attributes: true, characterData: true});
        }"""
    )
    draw(page, prompt="a red circle above a blue square", inference_steps=40, seed=7)
    card(page, "finished").wait_for()
    seen = page.evaluate("Object.fromEntries(Object.entries(window.seen).map(([name, values]) => [name, [...values]]))")
    assert len(seen["previews"]) >= 5
    assert len(seen["steps"]) >= 5 and seen["steps"] == sorted(seen["steps"])
    assert any(re.fullmatch(r"step \d+ of 40 · \d+\.\d s left", words) for words in seen["words"])
    drawn = client.post("/t2i", json={"prompt": "a red circle above a blue square", "inference_steps": 40, "seed": 7})
    assert np.abs(pixels(file_of(page)) - pixels(drawn.content)).max() <= 1
    said = card(page, "finished").inner_text()
    for word in ("seed 7", "128 × 128", "40 steps", "guidance 3", "queue", "denoise", "Predicted", "in all"):
        assert word in said
    with page.expect_download() as download:
        page.get_by_role("link", name="Download").click()
    assert download.value.suggested_filename == "noria-7.png"
    assert "Drawing 1 is done" in page.locator("#news").inner_text()


def test_several_are_drawn_at_once_and_share_the_batch(playground, server):
    page = playground()
    page.evaluate(
        """() => {
          window.most = 0;
          const note = () => (window.most = Math.max(window.most, document.querySelectorAll('.drawing[data-state="running"]').length));
          new MutationObserver(note).observe(document.querySelector("#drawings"), {subtree: true, childList: true, attributes: true});
        }"""
    )
    with held(engine_of(server)):
        draw(page, inference_steps=60)
        draw(page, prompt="a green star", n=2, inference_steps=50, scheduler="euler-a")
    card(page, "finished", 1).wait_for()
    assert page.evaluate("window.most") == 2
    assert page.locator("img.final").count() == 3
    assert "in a batch of" in page.locator(".drawing").nth(1).inner_text()
    page.locator(".opener").nth(1).focus()
    page.keyboard.press("Enter")
    assert page.locator("#large-place").inner_text().startswith("2 of 3")
    page.keyboard.press("ArrowRight")
    assert page.locator("#large-place").inner_text().startswith("3 of 3")
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.className") == "opener"


def test_all_tabs_of_a_browser_share_its_connections(playground):
    page = playground()
    other = page.context.new_page()
    other.set_default_timeout(PATIENCE_MS)
    other.goto(page.url)
    other.wait_for_selector("#draw:enabled")
    for _ in range(4):
        draw(page, **LONG)
    card(page, "running", 3).wait_for()
    draw(other, **LONG)
    other.locator(".drawing", has_text="waits here").wait_for()
    page.keyboard.press("Escape")
    card(other, "running").wait_for()
    draw(page, **LONG)
    page.locator(".drawing", has_text="waits here").wait_for()
    other.close()  # without a word
    card(page, "running", 3).wait_for()


def test_the_page_keeps_connections_for_other_things_than_drawings(playground, client, tmp_path):
    (tmp_path / "a.png").write_bytes(client.post("/t2i", json={"prompt": "p", "inference_steps": 1}).content)
    page = playground()
    for _ in range(6):
        draw(page, **LONG)
    card(page, "running", 3).wait_for()
    expect(page.locator(".drawing", has_text="waits here")).to_have_count(2)
    page.set_input_files("#recall-file", tmp_path / "a.png")
    page.locator("#recalled", has_text="are in the form").wait_for()
    page.locator(".drawing", has_text="waits here").first.get_by_role("button").click()
    for _ in range(4):
        page.locator('.drawing[data-state="running"]').last.get_by_role("button").click()
    page.locator("text=waits here").wait_for(state="detached")
    card(page, "running").wait_for()
    assert page.locator(".drawing").count() == 1
    page.keyboard.press("Escape")


@pytest.mark.parametrize("way", ["button", "escape"])
def test_what_is_cancelled_leaves_the_batch(playground, client, way):
    page = playground()
    wait_until(lambda: metric(client, "noria_slots_used") == 0)
    before = metric(client, "noria_leaves_total")
    draw(page, n=2, **LONG)
    card(page, "running").locator(".preview").first.wait_for(state="attached")
    wait_until(lambda: metric(client, "noria_slots_used") == 2)
    if way == "button":
        page.get_by_role("button", name="Cancel drawing 1").click()
    else:
        page.keyboard.press("Escape")
    page.locator(".drawing").wait_for(state="detached")
    wait_until(lambda: metric(client, "noria_slots_used") == 0)
    wait_until(lambda: metric(client, "noria_leaves_total") - before >= 2)
    assert metric(client, "noria_leaves_total") - before == 2
    assert page.locator("#empty").is_visible()
    assert page.locator("#news").inner_text() == "Drawing 1 is cancelled."


def test_a_refusal_stands_at_its_field_in_the_servers_words(playground, client, open_page):
    page = playground()
    words = client.post("/t2i", json={"prompt": "p", "width": 100}).json()["error"]["message"]
    draw(page, width=100)
    error = page.locator("#width-error")
    error.wait_for()
    assert error.inner_text() == words
    assert page.locator("#width").get_attribute("aria-invalid") == "true"
    assert page.evaluate("document.activeElement.id") == "width"
    assert page.locator(".drawing").count() == 0
    page.fill("#width", "128")
    assert not error.is_visible()
    page.click("summary")
    draw(page, deadline_ms=0)
    page.locator("#deadline_ms-error").wait_for()
    open_page.forgive(400)


def test_the_form_is_made_of_the_models_own_bounds(playground, client):
    page = playground()
    (model,) = client.get("/v1/models").json()["data"]
    offer = model["noria"]
    for name in ("width", "height", "inference_steps", "guidance_scale", "n"):
        field, bounds = page.locator(f"#{name}"), offer["settings"][name]
        assert (float(field.get_attribute("min")), float(field.get_attribute("max"))) == (bounds["min"], bounds["max"])
        assert float(field.input_value()) == bounds["default"]
    options = page.locator("#scheduler option").all_inner_texts()
    assert options == [f"{each['name']} — {each['description']}" for each in offer["schedulers"]]
    assert page.locator("#scheduler").input_value() == offer["default_scheduler"]
    for size in page.locator("#presets button").all():
        size.click()
        width, height = (int(page.locator(f"#{side}").input_value()) for side in ("width", "height"))
        assert not {width % 32, height % 32} - {0}
        assert size.get_attribute("aria-pressed") == "true"
    facts = page.locator("#facts").inner_text()
    assert "noria-shapes" in facts and offer["version"] in facts
    assert "/t2i" in page.locator("#first-command").inner_text()


@pytest.fixture
def two_models(tiny_folder):
    """A server of the bundled model and of one that draws 32 × 32 pixels of noise, by its folder's name."""
    with running_server(["bundled", "--more-models", str(tiny_folder), "--slots", "4", *PATIENT]) as running:
        yield running


def test_the_model_that_is_chosen_gives_the_bounds_and_draws_beside_the_other(
    two_models, playground, open_page, check_accessibility, tiny_folder
):
    url = f"http://127.0.0.1:{two_models.port}"
    page, wheel = playground(two_models.port), open_page(f"{url}/live")
    with httpx.Client(base_url=url, timeout=PATIENCE_MS / 1000) as client:
        offers = {each["id"]: each["noria"] for each in client.get("/v1/models").json()["data"]}
    chooser = page.get_by_label("Model", exact=True)
    assert chooser.locator("option").all_inner_texts() == list(offers) == ["noria-shapes", tiny_folder.name]
    for name in (tiny_folder.name, "noria-shapes", tiny_folder.name):
        chooser.select_option(name)
        assert shown_bounds(page) == bounds(offers[name])
    assert bounds(offers["noria-shapes"]) != bounds(offers[tiny_folder.name])
    check_accessibility(page)
    wheel.get_by_text("The slots as a table").click()
    wheel.evaluate(NOTED)
    with held(engine_of(two_models)):
        draw(page, inference_steps=100, n=2, seed=7)
        draw(page, model="noria-shapes", inference_steps=100)
    card(page, "finished", 1).wait_for()
    noted = wheel.evaluate("noted")
    assert any(", 2 models." in mix for mix, _ in noted)
    assert any(sorted(models) == sorted(["noria-shapes", *[tiny_folder.name] * 2]) for _, models in noted)
    assert wheel.locator(".engine").count() == 1
    check_accessibility(wheel)
    newest, first = page.locator(".drawing").all()
    assert newest.locator(".facts li").all_inner_texts()[:2] == ["noria-shapes", "128 × 128"]
    assert first.locator(".facts li").all_inner_texts()[:2] == [tiny_folder.name, "32 × 32"]
    with httpx.Client(base_url=url, timeout=PATIENCE_MS / 1000) as client:
        wish = {"model": tiny_folder.name, "prompt": page.input_value("#prompt"), "inference_steps": 100, "seed": 7}
        drawn = client.post("/t2i", json=wish)
    assert np.abs(pixels(file_of(page, "img.final[width='32']")) - pixels(drawn.content)).max() <= 1


NOTED = """() => {
  // What the wheel is said to be a mix of, and the models of its table, at any moment: an image may be done before anybody asks.
  window.noted = [];
  const note = () => noted.push([document.querySelector(".mix").textContent, [...document.querySelectorAll("td:nth-child(5)")].map((cell) => cell.textContent)]);
  new MutationObserver(note).observe(document.querySelector(".engine"), { subtree: true, childList: true, characterData: true });
}"""


def bounds(offer):
    numbers = {name: offer["settings"][name] for name in ("width", "height", "inference_steps", "guidance_scale")}
    return {name: (each["min"], each["max"], each["default"]) for name, each in numbers.items()} | {
        "scheduler": offer["default_scheduler"]
    }


def shown_bounds(page):
    numbers = {name: page.locator(f"#{name}") for name in ("width", "height", "inference_steps", "guidance_scale")}
    return {
        name: tuple(float(told) for told in (each.get_attribute("min"), each.get_attribute("max"), each.input_value()))
        for name, each in numbers.items()
    } | {"scheduler": page.input_value("#scheduler")}


# ── Taking it elsewhere, and back ───────────────────────────────────────────────────────────────────────────────────────────


def run_snippet(name, code, folder, environment):
    folder.mkdir()
    command = ["sh", "-c", code] if name == "curl" else [sys.executable, "-c", code]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr + code
    (file,) = folder.iterdir()
    return file


def copied(page, name):
    page.click(f"button:text-is('{name}')")
    page.locator("#news", has_text=f"Copied as {name}.").wait_for()
    return page.evaluate("navigator.clipboard.readText()")


def test_copied_code_draws_the_same_image(playground, tmp_path):
    page = playground(permissions=["clipboard-read", "clipboard-write"])
    draw(
        page,
        prompt=ODD,
        negative_prompt="it's grey",
        seed=BIG_SEED,
        inference_steps=4,
        guidance_scale=2.5,
        scheduler="euler-a",
    )
    card(page, "finished").wait_for()
    shown = pixels(file_of(page))
    for name in ("curl", "openai", "Python"):
        file = run_snippet(name, copied(page, name), tmp_path / name, os.environ)
        assert np.abs(pixels(file.read_bytes()) - shown).max() <= 1, name
        assert name == "curl" or file.stem == BIG_SEED


def test_a_dropped_file_brings_its_settings_back_and_the_same_image(playground, client):
    page = playground()
    asked = {"prompt": ODD, "negative_prompt": "grey", "seed": int(BIG_SEED), "width": 96, "height": 160, "inference_steps": 3,
             "guidance_scale": 2.5, "scheduler": "euler", "format": "webp"}  # fmt: skip
    file = client.post("/t2i", json=asked).content
    dropped = page.evaluate_handle(
        """(text) => {
          const bytes = Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
          const transfer = new DataTransfer();
          transfer.items.add(new File([bytes], "mine.webp", {type: "image/webp"}));
          return transfer;
        }""",
        base64.b64encode(file).decode(),
    )
    page.dispatch_event("#drop", "dragover", {"dataTransfer": dropped})
    assert "over" in page.locator("#drop").get_attribute("class")
    page.dispatch_event("#drop", "drop", {"dataTransfer": dropped})
    page.locator("#recalled", has_text="The settings of mine.webp, drawn by Noria").wait_for()
    for name in (
        "prompt",
        "negative_prompt",
        "seed",
        "width",
        "height",
        "inference_steps",
        "guidance_scale",
        "scheduler",
    ):
        assert page.locator(f"#{name}").input_value() == str(asked[name]), name
    draw(page)
    card(page, "finished").wait_for()
    png = client.post("/t2i", json=asked | {"format": "png"}).content
    assert np.abs(pixels(file_of(page)) - pixels(png)).max() <= 1


def test_a_file_is_chosen_by_keyboard_and_what_cannot_be_had_is_told(playground, tmp_path, open_page):
    from PIL.PngImagePlugin import PngInfo

    page = playground()
    chunks = PngInfo()
    chunks.add_text(
        "parameters",
        "a cat\nSteps: 20, Sampler: DPM++ SDE, CFG scale: 7, Seed: 5, Size: 512x512, Model: dreams, Clip skip: 2",
    )
    Image.new("RGB", (8, 8)).save(tmp_path / "cat.png", pnginfo=chunks)
    (tmp_path / "words.txt").write_text("no image")
    page.on(
        "filechooser", lambda _: None
    )  # or Playwright asks Chromium for it while Enter is pressed, now and then too late
    page.focus("#recall-choose")
    with page.expect_file_chooser() as chooser:
        page.keyboard.press("Enter")
    chooser.value.set_files(tmp_path / "cat.png")
    told = page.locator("#recalled", has_text="Not to be had here")
    told.wait_for()
    for word in ("dreams", "Brownian", "512", "Clip skip: 2", "another program"):
        assert word in told.inner_text()
    assert page.locator("#prompt").input_value() == "a cat"
    assert page.locator("#guidance_scale").input_value() == "7"
    page.set_input_files("#recall-file", tmp_path / "words.txt")
    page.locator("#recalled", has_text="words.txt: the file is not an image").wait_for()
    assert page.locator("#prompt").input_value() == "a cat"
    open_page.forgive(422)


def test_a_drawing_is_recalled_and_its_seed_used_again(playground):
    page = playground()
    draw(page, prompt="a green star", inference_steps=3, guidance_scale=2)
    card(page, "finished").wait_for()
    seed = re.search(r"seed (\d+)", card(page, "finished").inner_text())[1]
    page.fill("#prompt", "something else")
    page.get_by_role("button", name="Use seed").click()
    assert page.locator("#seed").input_value() == seed
    page.click("#seed-random")
    assert page.locator("#seed").input_value() == ""
    page.click("button:text-is('Recall')")
    assert [page.locator(f"#{name}").input_value() for name in ("prompt", "seed", "guidance_scale")] == [
        "a green star",
        seed,
        "2",
    ]
    page.get_by_role("button", name="Remove drawing 1").click()
    assert page.locator("#empty").is_visible()


# ── Servers that are not ready, or not open ─────────────────────────────────────────────────────────────────────────────────


def test_the_page_waits_for_an_engine_and_goes_on_by_itself(playground, open_page, server, client):
    with held(server.process):  # the supervisor: no other engine is there before the page has seen that none is
        engine_of(server).kill()
        wait_until(lambda: client.get("/readyz").status_code == 503)
        page = open_page(f"http://127.0.0.1:{server.port}/")
        page.locator("#notice", has_text="No engine is ready yet").wait_for()
        assert page.locator("#draw").is_disabled()
    page.wait_for_selector("#draw:enabled", timeout=PATIENCE_MS)
    assert not page.locator("#notice").is_visible()
    open_page.forgive(503)


def test_a_server_that_goes_away_while_it_draws_is_missed_at_once(playground, open_page, server):
    page = playground()
    draw(page, **LONG)
    card(page, "running").wait_for()
    page.get_by_role("button", name="Cancel drawing 1").focus()
    page.route(
        "**/readyz", lambda route: route.abort()
    )  # or the supervisor's next front end may be there too soon to be missed
    for process in server.children("frontend"):
        process.kill()
    page.locator("#notice", has_text="cannot be reached. This page goes on by itself").wait_for()
    assert page.locator("#draw").is_disabled()
    assert page.locator("#served").inner_text() == "not reached"
    expect(card(page, "failed").get_by_role("button", name="Try again")).to_be_focused()
    page.unroute("**/readyz")
    page.wait_for_selector("#draw:enabled")
    assert not page.locator("#notice").is_visible()
    open_page.forgive("net::ERR_")
    open_page.forgive(503, perhaps=True)  # of the next front end, before it knows an engine


def test_the_keyboard_keeps_its_place_when_a_drawing_is_done(playground, server):
    page = playground()
    with held(engine_of(server)):
        draw(page, inference_steps=10)
        page.get_by_role("button", name="Cancel drawing 1").focus()
    card(page, "finished").wait_for()
    expect(page.locator(".opener")).to_be_focused()


def test_a_server_with_keys_asks_for_one_and_never_gives_it_away(playground, open_page, tmp_path):
    key, table = generate_key("alice")
    (tmp_path / "keys.toml").write_text(table)
    with running_server(["bundled", "--slots", "2", "--keys-file", str(tmp_path / "keys.toml")]) as closed:
        page = open_page(f"http://127.0.0.1:{closed.port}/", permissions=["clipboard-read", "clipboard-write"])
        page.set_default_timeout(PATIENCE_MS)
        page.locator("#key").wait_for()
        assert page.locator("#draw").is_disabled()
        page.fill("#key-value", "wrong")
        page.keyboard.press("Enter")
        page.locator("#notice", has_text="not known here").wait_for()
        page.fill("#key-value", key)
        page.keyboard.press("Enter")
        page.wait_for_selector("#draw:enabled")
        assert not page.locator("#key").is_visible()
        expect(page.locator("#prompt")).to_be_focused()
        draw(page, inference_steps=2)
        card(page, "finished").wait_for()
        for name in ("curl", "openai", "Python"):
            code = copied(page, name)
            assert key not in code
            run_snippet(name, code, tmp_path / name, os.environ | {"NORIA_API_KEY": key})
    open_page.forgive(401)


# ── For everybody ───────────────────────────────────────────────────────────────────────────────────────────────────────────

SCENES = (
    ("a red circle above a blue square", 7, "dpm++2m"),
    ("a small yellow star on the left on a blue background", 9, "euler-a"),
    ("a green star", 3, "ddim"),
)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_accessible_empty_running_and_finished(playground, check_accessibility, picture, scheme):
    page = playground(color_scheme=scheme, viewport={"width": 1280, "height": 900})
    check_accessibility(page)
    for prompt, seed, scheduler in SCENES:
        draw(page, prompt=prompt, seed=seed, scheduler=scheduler, inference_steps=20)
    card(page, "finished", len(SCENES) - 1).wait_for()
    check_accessibility(page)
    draw(
        page, prompt="a purple triangle to the right of a green circle", seed=21, inference_steps=200, scheduler="unipc"
    )
    draw(page, prompt="a white star on a blue background", n=4, seed=40, inference_steps=100, scheduler="euler")
    halfway = "[...document.querySelectorAll('progress')].filter((bar) => bar.position > 0.3).length === 2"
    wait_until(
        lambda: page.evaluate(halfway)
    )  # Playwright's own waiting for a function needs eval, which the pages forbid
    page.evaluate("window.scrollTo(0, 0)")
    picture(page, f"playground-{scheme}.png")
    check_accessibility(page)
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    page.locator(".opener").first.click()
    check_accessibility(page)


@pytest.mark.parametrize("width", [320, 390])
def test_it_fits_a_telephone(playground, width):
    page = playground(viewport={"width": width, "height": 800})
    draw(page, prompt="a" * 300, n=2, inference_steps=2, scheduler="euler-karras")
    expect(page.locator(".drawing")).to_be_in_viewport()
    card(page, "finished").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") == width
    for control in page.locator(
        "button:visible, input:visible, select:visible, textarea:visible, a.button:visible"
    ).all():
        box = control.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= width, control.evaluate("control => control.outerHTML")
