"""The playground of a real server with the bundled model."""

import os
import re

import httpx
import numpy as np
import pytest
from expect_on_page import engine_of, expect, suspended
from PIL import Image
from playground_page import TIMEOUT_MS, card, copied, file_of, generate, pixels, run_snippet, transfer

from noria.frontend.access.api_keys import generate_key
from noria.testing.server import running_server
from waiting import wait_until

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

SPECIAL_CHARACTERS = 'it\'s a "red" \\ circle, $HOME `x` 星\nabove a blue square'
# The longest request possible, so that it runs until the test cancels it.
LONG = {"inference_steps": 200, "scheduler": "heun"}
# For tests that suspend the engine.
LONG_TIMEOUTS = ["--queue-limit-s", "600", "--hang-timeout-s", "600"]
BIG_SEED = "4611686018427387905"  # 2^62 + 1: JavaScript's numbers end at 2^53


@pytest.fixture(scope="module")
def server():
    with running_server(["bundled", "--slots", "4", *LONG_TIMEOUTS]) as running:
        yield running


@pytest.fixture
def client(server):
    with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=120, verify=False) as opened:
        yield opened


@pytest.fixture
def playground(open_page, server):
    """Open the page and wait until it is ready."""

    def open_playground(port=None, **options):
        page = open_page(f"http://127.0.0.1:{port or server.port}/", **options)
        page.set_default_timeout(TIMEOUT_MS)
        page.wait_for_selector("#generate:enabled")
        return page

    return open_playground


def metric(client, name):
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.split("{")[0].split(" ")[0] == name)


# ── Generating ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_previews_and_progress_are_shown_until_the_image_is_finished(playground, client):
    page = playground()
    page.evaluate(
        """() => {
          window.seen = {previews: new Set(), steps: new Set(), texts: new Set()};
          new MutationObserver(() => {
            for (const image of document.querySelectorAll(".preview")) window.seen.previews.add(image.dataset.step);
            const bar = document.querySelector("progress");
            if (bar?.position > 0) window.seen.steps.add(bar.value);
            const status = document.querySelector(".status-line");
            if (status) window.seen.texts.add(status.textContent);
          }).observe(document.querySelector("#generations"), {subtree: true, childList: true, attributes: true, characterData: true});
        }"""
    )
    generate(page, prompt="a red circle above a blue square", inference_steps=40, seed=7)
    card(page, "finished").wait_for()
    seen = page.evaluate("Object.fromEntries(Object.entries(window.seen).map(([name, values]) => [name, [...values]]))")
    assert len(seen["previews"]) >= 5
    assert len(seen["steps"]) >= 5 and seen["steps"] == sorted(seen["steps"])
    assert any(re.fullmatch(r"step \d+ of 40 · \d+\.\d s left", text) for text in seen["texts"])
    expected = client.post(
        "/t2i", json={"prompt": "a red circle above a blue square", "inference_steps": 40, "seed": 7}
    )
    assert np.abs(pixels(file_of(page)) - pixels(expected.content)).max() <= 1
    text = card(page, "finished").inner_text()
    for word in ("seed 7", "128 × 128", "40 steps", "guidance 3", "queue", "denoise", "Predicted", "in all"):
        assert word in text
    with page.expect_download() as download:
        page.get_by_role("link", name="Download").click()
    assert download.value.suggested_filename == "noria-7.png"
    assert "Generation 1 is done" in page.locator("#announcements").inner_text()


def test_requests_run_together_in_one_batch(playground, server):
    page = playground()
    page.evaluate(
        """() => {
          window.maxRunning = 0;
          const note = () => (window.maxRunning = Math.max(window.maxRunning, document.querySelectorAll('.generation[data-state="running"]').length));
          new MutationObserver(note).observe(document.querySelector("#generations"), {subtree: true, childList: true, attributes: true});
          window.answers = [];
          const send = window.fetch;
          window.fetch = async (...request) => {
            const answer = await send(...request);
            if (answer.ok && answer.url.endsWith("/t2i")) window.answers.push(answer.clone().text());
            return answer;
          };
        }"""
    )
    with suspended(engine_of(server)):
        generate(page, inference_steps=60)
        generate(page, prompt="a green star", n=2, inference_steps=50, scheduler="euler-a")
    card(page, "finished", 1).wait_for()
    assert page.evaluate("window.maxRunning") == 2
    assert page.locator("img.final").count() == 3
    # How many images share a call is measured, and depends on the machine.
    answers = page.evaluate("Promise.all(window.answers)")
    batches = [float(re.findall(r'"mean_batch":([\d.]+)', answer)[-1]) for answer in answers]
    shown = [f"in a batch of {batch:.1f}" if batch > 1.05 else "alone in its batch" for batch in batches]
    cards = page.locator(".generation").all_inner_texts()
    assert len(shown) == 2 and all(any(text in card for card in cards) for text in shown)
    page.locator(".open-large").nth(1).focus()
    page.keyboard.press("Enter")
    assert page.locator("#large-position").inner_text().startswith("2 of 3")
    page.keyboard.press("ArrowRight")
    assert page.locator("#large-position").inner_text().startswith("3 of 3")
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.className") == "open-large"


def test_tabs_of_a_browser_share_the_limit_of_requests(playground):
    page = playground()
    other = page.context.new_page()
    other.set_default_timeout(TIMEOUT_MS)
    other.goto(page.url)
    other.wait_for_selector("#generate:enabled")
    for _ in range(4):
        generate(page, **LONG)
    card(page, "running", 3).wait_for()
    generate(other, **LONG)
    other.locator(".generation", has_text="waiting: four requests").wait_for()
    page.keyboard.press("Escape")
    card(other, "running").wait_for()
    generate(page, **LONG)
    page.locator(".generation", has_text="waiting: four requests").wait_for()
    other.close()  # without cancelling
    card(page, "running", 3).wait_for()


def test_limit_leaves_connections_for_other_requests(playground, client, tmp_path):
    (tmp_path / "a.png").write_bytes(client.post("/t2i", json={"prompt": "p", "inference_steps": 1}).content)
    page = playground()
    for _ in range(6):
        generate(page, **LONG)
    card(page, "running", 3).wait_for()
    expect(page.locator(".generation", has_text="waiting: four requests")).to_have_count(2)
    page.set_input_files("#metadata-file", tmp_path / "a.png")
    page.locator("#metadata-report", has_text="are in the form").wait_for()
    page.locator(".generation", has_text="waiting: four requests").first.get_by_role("button").click()
    for _ in range(4):
        page.locator('.generation[data-state="running"]').last.get_by_role("button").click()
    page.locator("text=waiting: four requests").wait_for(state="detached")
    card(page, "running").wait_for()
    assert page.locator(".generation").count() == 1
    page.keyboard.press("Escape")


@pytest.mark.parametrize("way", ["button", "escape"])
def test_cancelled_request_leaves_the_batch(playground, client, way):
    page = playground()
    wait_until(lambda: metric(client, "noria_slots_used") == 0)
    before = metric(client, "noria_departures_total")
    generate(page, n=2, **LONG)
    card(page, "running").locator(".preview").first.wait_for(state="attached")
    wait_until(lambda: metric(client, "noria_slots_used") == 2)
    if way == "button":
        page.get_by_role("button", name="Cancel generation 1").click()
    else:
        page.keyboard.press("Escape")
    page.locator(".generation").wait_for(state="detached")
    wait_until(lambda: metric(client, "noria_slots_used") == 0)
    wait_until(lambda: metric(client, "noria_departures_total") - before >= 2)
    assert metric(client, "noria_departures_total") - before == 2
    assert page.locator("#empty").is_visible()
    assert page.locator("#announcements").inner_text() == "Generation 1 is cancelled."


def test_error_is_shown_at_its_field_with_the_servers_message(playground, client, open_page):
    page = playground()
    message = client.post("/t2i", json={"prompt": "p", "width": 100}).json()["error"]["message"]
    generate(page, width=100)
    error = page.locator("#width-error")
    error.wait_for()
    assert error.inner_text() == message
    assert page.locator("#width").get_attribute("aria-invalid") == "true"
    assert page.evaluate("document.activeElement.id") == "width"
    assert page.locator(".generation").count() == 0
    page.fill("#width", "128")
    assert not error.is_visible()
    page.click("summary")
    generate(page, deadline_ms=0)
    page.locator("#deadline_ms-error").wait_for()
    open_page.ignore_logged(400)


def test_form_has_the_bounds_of_the_model(playground, client):
    page = playground()
    (model,) = client.get("/v1/models").json()["data"]
    capabilities = model["noria"]
    for name in ("width", "height", "inference_steps", "guidance_scale", "n"):
        field, bounds = page.locator(f"#{name}"), capabilities["settings"][name]
        assert (float(field.get_attribute("min")), float(field.get_attribute("max"))) == (bounds["min"], bounds["max"])
        assert float(field.input_value()) == bounds["default"]
    options = page.locator("#scheduler option").all_inner_texts()
    assert options == [f"{each['name']} — {each['description']}" for each in capabilities["schedulers"]]
    assert page.locator("#scheduler").input_value() == capabilities["default_scheduler"]
    for size in page.locator("#presets button").all():
        size.click()
        width, height = (int(page.locator(f"#{side}").input_value()) for side in ("width", "height"))
        assert not {width % 32, height % 32} - {0}
        assert size.get_attribute("aria-pressed") == "true"
    for calls, says in [("", "All calls are made."), ("0.5", "10 of 20 calls: 10 are skipped"), ("1", "All calls")]:
        page.fill("#calls", calls)
        expect(page.locator("#calls-hint")).to_contain_text(says)
    facts = page.locator("#facts").inner_text()
    assert "noria-shapes" in facts and capabilities["version"] in facts
    assert "/t2i" in page.locator("#first-command").inner_text()


@pytest.fixture
def two_models(tiny_folder):
    """A server with the bundled model and one that generates 32 × 32 pixels of noise, named after its folder."""
    with running_server(
        ["bundled", "--additional-models", str(tiny_folder), "--slots", "4", *LONG_TIMEOUTS]
    ) as running:
        yield running


def test_selected_model_sets_the_bounds_and_runs_beside_the_other(
    two_models, playground, open_page, check_accessibility, tiny_folder
):
    url = f"http://127.0.0.1:{two_models.port}"
    page, live = playground(two_models.port), open_page(f"{url}/live")
    with httpx.Client(base_url=url, timeout=TIMEOUT_MS / 1000) as client:
        capabilities = {each["id"]: each["noria"] for each in client.get("/v1/models").json()["data"]}
    select = page.get_by_label("Model", exact=True)
    assert select.locator("option").all_inner_texts() == list(capabilities) == ["noria-shapes", tiny_folder.name]
    for name in (tiny_folder.name, "noria-shapes", tiny_folder.name):
        select.select_option(name)
        assert shown_bounds(page) == bounds(capabilities[name])
    assert bounds(capabilities["noria-shapes"]) != bounds(capabilities[tiny_folder.name])
    check_accessibility(page)
    live.get_by_text("The slots as a table").click()
    live.evaluate(NOTED)
    with suspended(engine_of(two_models)):
        generate(page, inference_steps=100, n=2, seed=7)
        generate(page, model="noria-shapes", inference_steps=100)
    card(page, "finished", 1).wait_for()
    noted = live.evaluate("noted")
    assert any(", 2 models." in summary for summary, _ in noted)
    assert any(sorted(models) == sorted(["noria-shapes", *[tiny_folder.name] * 2]) for _, models in noted)
    assert live.locator(".engine").count() == 1
    check_accessibility(live)
    newest, first = page.locator(".generation").all()
    assert newest.locator(".facts li").all_inner_texts()[:2] == ["noria-shapes", "128 × 128"]
    assert first.locator(".facts li").all_inner_texts()[:2] == [tiny_folder.name, "32 × 32"]
    with httpx.Client(base_url=url, timeout=TIMEOUT_MS / 1000) as client:
        body = {"model": tiny_folder.name, "prompt": page.input_value("#prompt"), "inference_steps": 100, "seed": 7}
        expected = client.post("/t2i", json=body)
    assert np.abs(pixels(file_of(page, "img.final[width='32']")) - pixels(expected.content)).max() <= 1


NOTED = """() => {
  // Each summary of the batch and, with it, the table's models: images may be done before the test reads them, and before the table,
  // which is written once a second, has them. An opened table is written immediately.
  window.noted = [];
  const [engine, table] = [document.querySelector(".engine"), document.querySelector(".engine details")];
  new MutationObserver(() => {
    const summary = document.querySelector(".batch-summary").textContent;
    if (summary === noted.at(-1)?.[0]) return;
    table.dispatchEvent(new Event("toggle"));
    noted.push([summary, [...table.querySelectorAll("td:nth-child(6)")].map((cell) => cell.textContent)]);
  }).observe(engine, { subtree: true, childList: true, characterData: true });
}"""


def bounds(capabilities):
    numbers = {
        name: capabilities["settings"][name] for name in ("width", "height", "inference_steps", "guidance_scale")
    }
    return {name: (each["min"], each["max"], each["default"]) for name, each in numbers.items()} | {
        "scheduler": capabilities["default_scheduler"]
    }


def shown_bounds(page):
    numbers = {name: page.locator(f"#{name}") for name in ("width", "height", "inference_steps", "guidance_scale")}
    return {
        name: tuple(
            float(value) for value in (each.get_attribute("min"), each.get_attribute("max"), each.input_value())
        )
        for name, each in numbers.items()
    } | {"scheduler": page.input_value("#scheduler")}


# ── Copying and reusing settings ──────────────────────────────────────────────────────────────────────────────────────


def test_copied_code_generates_the_same_image(playground, tmp_path):
    page = playground(permissions=["clipboard-read", "clipboard-write"])
    generate(
        page,
        prompt=SPECIAL_CHARACTERS,
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


def test_dropped_file_gives_its_settings_and_the_same_image(playground, client):
    page = playground()
    settings = {"prompt": SPECIAL_CHARACTERS, "negative_prompt": "grey", "seed": int(BIG_SEED), "width": 96, "height": 160, "inference_steps": 3,
             "guidance_scale": 2.5, "scheduler": "euler", "format": "webp"}  # fmt: skip
    file = client.post("/t2i", json=settings).content
    dropped = transfer(page, "mine.webp", file, "image/webp")
    page.dispatch_event("#drop", "dragover", {"dataTransfer": dropped})
    assert "drag-over" in page.locator("#drop").get_attribute("class")
    page.dispatch_event("#drop", "drop", {"dataTransfer": dropped})
    page.locator("#metadata-report", has_text="The settings of mine.webp, generated by Noria").wait_for()
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
        assert page.locator(f"#{name}").input_value() == str(settings[name]), name
    generate(page)
    card(page, "finished").wait_for()
    png = client.post("/t2i", json=settings | {"format": "png"}).content
    assert np.abs(pixels(file_of(page)) - pixels(png)).max() <= 1


def test_file_is_chosen_by_keyboard_and_unsupported_settings_are_listed(playground, tmp_path, open_page):
    from PIL.PngImagePlugin import PngInfo

    page = playground()
    chunks = PngInfo()
    chunks.add_text(
        "parameters",
        "a cat\nSteps: 20, Sampler: DPM++ SDE, CFG scale: 7, Seed: 5, Size: 512x512, Model: dreams, Eta: 0.5",
    )
    Image.new("RGB", (8, 8)).save(tmp_path / "cat.png", pnginfo=chunks)
    (tmp_path / "words.txt").write_text("no image")
    # Makes Playwright intercept the dialog before Enter is pressed; later is sometimes too late.
    page.on("filechooser", lambda _: None)
    page.focus("#metadata-choose")
    with page.expect_file_chooser() as chooser:
        page.keyboard.press("Enter")
    chooser.value.set_files(tmp_path / "cat.png")
    report = page.locator("#metadata-report", has_text="Not supported by this server")
    report.wait_for()
    for word in ("dreams", "Brownian", "512", "Eta: 0.5", "another program"):
        assert word in report.inner_text()
    assert page.locator("#prompt").input_value() == "a cat"
    assert page.locator("#guidance_scale").input_value() == "7"
    page.set_input_files("#metadata-file", tmp_path / "words.txt")
    page.locator("#metadata-report", has_text="words.txt: the file is not an image").wait_for()
    assert page.locator("#prompt").input_value() == "a cat"
    open_page.ignore_logged(422)


def test_settings_and_seed_of_a_generation_are_reused(playground):
    page = playground()
    generate(page, prompt="a green star", inference_steps=3, guidance_scale=2)
    card(page, "finished").wait_for()
    seed = re.search(r"seed (\d+)", card(page, "finished").inner_text())[1]
    page.fill("#prompt", "something else")
    page.get_by_role("button", name="Use seed").click()
    assert page.locator("#seed").input_value() == seed
    page.click("#seed-random")
    assert page.locator("#seed").input_value() == ""
    page.click("button:text-is('Reuse settings')")
    assert [page.locator(f"#{name}").input_value() for name in ("prompt", "seed", "guidance_scale")] == [
        "a green star",
        seed,
        "2",
    ]
    page.get_by_role("button", name="Remove generation 1").click()
    assert page.locator("#empty").is_visible()


def test_loras_are_chosen_shown_and_reused(playground, client, check_accessibility):
    page = playground()
    page.get_by_role("button", name="Add a LoRA").click()
    page.get_by_label("LoRA", exact=True).select_option("night")
    page.get_by_label("Weight of the LoRA").fill("0.9")
    check_accessibility(page)
    generate(page, prompt="a green star", inference_steps=3, seed=5)
    card(page, "finished").wait_for()
    assert "night × 0.9" in card(page, "finished").inner_text()
    body = {"prompt": "a green star", "inference_steps": 3, "seed": 5, "loras": [{"name": "night", "weight": 0.9}]}
    expected = client.post("/t2i", json=body)
    assert np.abs(pixels(file_of(page)) - pixels(expected.content)).max() <= 1
    page.get_by_role("button", name="Remove this LoRA").click()
    assert page.locator(".lora").count() == 0
    page.click("button:text-is('Reuse settings')")
    assert page.get_by_label("LoRA", exact=True).input_value() == "night"
    assert page.get_by_label("Weight of the LoRA").input_value() == "0.9"


# ── Servers that are not ready or need a key ──────────────────────────────────────────────────────────────────────────


def test_page_waits_for_an_engine_and_continues(playground, open_page, server, client):
    with suspended(server.process):  # the supervisor starts no engine before the page has seen that there is none
        engine_of(server).kill()
        wait_until(lambda: client.get("/readyz").status_code == 503)
        page = open_page(f"http://127.0.0.1:{server.port}/")
        page.locator("#notice", has_text="No engine is ready yet").wait_for()
        assert page.locator("#generate").is_disabled()
    page.wait_for_selector("#generate:enabled", timeout=TIMEOUT_MS)
    assert not page.locator("#notice").is_visible()
    open_page.ignore_logged(503)


def test_lost_server_is_noticed_during_a_generation(playground, open_page, server):
    page = playground()
    generate(page, **LONG)
    card(page, "running").wait_for()
    page.get_by_role("button", name="Cancel generation 1").focus()
    # The supervisor's next front end may be ready before the page notices.
    page.route("**/readyz", lambda route: route.abort())
    for process in server.children("frontend"):
        process.kill()
    page.locator("#notice", has_text="cannot be reached. This page continues by itself").wait_for()
    assert page.locator("#generate").is_disabled()
    assert page.locator("#page-status").inner_text() == "not reached"
    expect(card(page, "failed").get_by_role("button", name="Try again")).to_be_focused()
    page.unroute("**/readyz")
    page.wait_for_selector("#generate:enabled")
    assert not page.locator("#notice").is_visible()
    open_page.ignore_logged("net::ERR_")
    open_page.ignore_logged(503, optional=True)  # from the next front end, before it has an engine


def test_focus_moves_to_the_image_when_a_generation_is_done(playground, server):
    page = playground()
    with suspended(engine_of(server)):
        generate(page, inference_steps=10)
        page.get_by_role("button", name="Cancel generation 1").focus()
    card(page, "finished").wait_for()
    expect(page.locator(".open-large")).to_be_focused()


def test_page_asks_for_an_api_key_and_keeps_it_out_of_copied_code(playground, open_page, tmp_path):
    key, table = generate_key("alice")
    (tmp_path / "keys.toml").write_text(table)
    with running_server(["bundled", "--slots", "2", "--api-keys-file", str(tmp_path / "keys.toml")]) as closed:
        page = open_page(f"http://127.0.0.1:{closed.port}/", permissions=["clipboard-read", "clipboard-write"])
        page.set_default_timeout(TIMEOUT_MS)
        page.locator("#key").wait_for()
        assert page.locator("#generate").is_disabled()
        page.fill("#key-value", "wrong")
        page.keyboard.press("Enter")
        page.locator("#notice", has_text="not known here").wait_for()
        page.fill("#key-value", key)
        page.keyboard.press("Enter")
        page.wait_for_selector("#generate:enabled")
        assert not page.locator("#key").is_visible()
        expect(page.locator("#prompt")).to_be_focused()
        generate(page, inference_steps=2)
        card(page, "finished").wait_for()
        for name in ("curl", "openai", "Python"):
            code = copied(page, name)
            assert key not in code
            run_snippet(name, code, tmp_path / name, os.environ | {"NORIA_API_KEY": key})
    open_page.ignore_logged(401)


# ── Accessibility ─────────────────────────────────────────────────────────────────────────────────────────────────────

SCENES = (
    ("a red circle above a blue square", 7, "dpm++2m"),
    ("a small yellow star on the left on a blue background", 9, "euler-a"),
    ("a green star", 3, "ddim"),
)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_page_is_accessible_when_empty_running_and_finished(playground, check_accessibility, screenshot, scheme):
    page = playground(color_scheme=scheme, viewport={"width": 1280, "height": 900})
    check_accessibility(page)
    for prompt, seed, scheduler in SCENES:
        generate(page, prompt=prompt, seed=seed, scheduler=scheduler, inference_steps=20)
    card(page, "finished", len(SCENES) - 1).wait_for()
    check_accessibility(page)
    generate(
        page, prompt="a purple triangle to the right of a green circle", seed=21, inference_steps=200, scheduler="unipc"
    )
    generate(page, prompt="a white star on a blue background", n=4, seed=40, inference_steps=100, scheduler="euler")
    halfway = "[...document.querySelectorAll('progress')].some((bar) => bar.position > 0.3)"
    # page.wait_for_function needs eval, which the content security policy forbids.
    wait_until(lambda: page.evaluate(halfway))
    page.evaluate("window.scrollTo(0, 0)")
    screenshot(page, f"playground-{scheme}.png")
    check_accessibility(page)
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    page.locator(".open-large").first.click()
    check_accessibility(page)


@pytest.mark.parametrize("width", [320, 390])
def test_page_fits_a_phone(playground, width):
    page = playground(viewport={"width": width, "height": 800})
    generate(page, prompt="a" * 300, n=2, inference_steps=2, scheduler="euler-karras")
    expect(page.locator(".generation")).to_be_in_viewport()
    card(page, "finished").wait_for()
    assert page.evaluate("document.documentElement.scrollWidth") == width
    for control in page.locator(
        "button:visible, input:visible, select:visible, textarea:visible, a.button:visible"
    ).all():
        box = control.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= width, control.evaluate("control => control.outerHTML")
