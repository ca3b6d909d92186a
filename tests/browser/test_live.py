"""The page /live before a scripted stream: what is drawn, said and done, in Chromium."""

import json
import re

import feed
import pytest
from expecting import expect

pytestmark = pytest.mark.browser


@pytest.fixture
def serve():
    """Start a feed; `serve(num_slots=64, …)` takes the fields of `Feed`."""
    running = []

    def start(**fields):
        context = feed.served(feed.Feed(**fields))
        running.append(context)
        return context.__enter__()

    yield start
    for context in running:
        context.__exit__(None, None, None)


def slots(page):
    return page.get_by_role("list", name="Slots of engine-0").get_by_role("button")


def test_each_slot_is_a_button_that_says_whose_image_it_holds(serve, open_page):
    page = open_page(serve(num_slots=8).url)
    expect(slots(page)).to_have_count(8)
    expect(page.get_by_role("button", name="Slot 3:")).to_have_accessible_name(
        re.compile(r"Slot 3: \S+, \d+ calls, \d+ × 128 px, guidance [\d.]+")
    )
    expect(slots(page).nth(3)).to_have_accessible_description(re.compile(r"^\d+/\d+ \S+"))
    expect(page.locator(".mix")).to_contain_text("Together now: ")
    expect(page.locator(".mix")).to_contain_text(" schedulers, ")
    expect(page.locator("#connection")).to_have_text("live")


def test_a_slot_changes_hands_while_its_neighbours_go_on(serve, open_page):
    page = open_page(serve(num_slots=8).url)
    expect(slots(page)).to_have_count(8)
    changed = page.evaluate(WATCHED, 20)
    assert any(changed), "nobody boarded or left"
    assert max(changed) < 8, "a batch that changes all at once is a static one"
    expect(page.locator(".gone li").first).to_be_visible()


WATCHED = """async (times) => {
  // In how many slots another image is than in the view before. Of a server that was held up, one view may tell of any number of turns:
  // only those at most six turns apart are judged, in which the script never changes all.
  const state = await import("/pages/state.js"), { events } = await import("/pages/events.js");
  const changed = [];
  let before = null;
  for await (const { name, data } of events(await fetch("/v1/live"))) {
    if (name !== "wheel") continue;
    const images = Array.from({ length: data.num_slots }, (_, slot) => {
      const seat = data.seats.find((one) => one.slot === slot);
      return seat ? state.keyOf(seat) : null;
    });
    if (before && data.number - before.number <= 6) changed.push(images.filter((image, slot) => image !== before.images[slot]).length);
    before = { number: data.number, images };
    if (changed.length === times) return changed;
  }
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("num_slots", [8, 40])
def test_it_is_accessible(serve, open_page, check_accessibility, scheme, num_slots):
    page = open_page(serve(num_slots=num_slots).url, color_scheme=scheme)
    expect(slots(page)).to_have_count(num_slots)
    expect(page.locator(".gone li").first).to_be_visible()
    page.get_by_text("The slots as a table").click()
    expect(page.get_by_role("row")).not_to_have_count(1)
    page.get_by_role("button", name="Pause").click()  # what moves is not judged twice the same
    check_accessibility(page)


def test_slots_are_walked_with_the_arrows_and_chosen_with_enter(serve, open_page):
    page = open_page(serve(num_slots=8).url)
    expect(slots(page)).to_have_count(8)
    slots(page).nth(0).focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    expect(slots(page).nth(2)).to_be_focused()
    page.keyboard.press("Enter")
    expect(slots(page).nth(2)).to_have_attribute("aria-pressed", "true")
    expect(page.locator(".chosen")).to_contain_text("Slot 2")
    page.keyboard.press("End")
    expect(slots(page).nth(7)).to_be_focused()
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.closest('.slots')") is None, "Tab leaves the wheel"


def test_a_slots_name_stays_while_its_image_does(serve, open_page):
    page = open_page(serve(num_slots=8).url)
    expect(slots(page)).to_have_count(8)
    slots(page).nth(0).focus()  # when it was said anew, once
    renamed = page.evaluate(RENAMED, 10)
    # Two that follow each other in a slot may be alike; of names that are written at every step, all but a few are.
    assert sum(before == name for before, name in renamed) <= 2
    assert not any(re.search(r"call \d|done in|due in", name) for _, name in renamed)


RENAMED = """(times) => new Promise((resolve) => {
  // Names that are written, so many of them, each with the one before.
  const names = [];
  const note = (changes) => {
    changes.forEach(({ target, oldValue }) => names.push([oldValue, target.getAttribute("aria-label")]));
    if (names.length >= times) resolve(names);
  };
  new MutationObserver(note).observe(document.querySelector(".slots"), { subtree: true, attributeFilter: ["aria-label"], attributeOldValue: true });
})"""


def test_who_is_paused_is_said_to_be(serve, open_page, check_accessibility):
    page = open_page(serve(num_slots=8, paused=(3,)).url)
    expect(slots(page).nth(3)).to_contain_text(re.compile(r"paused.*0/\d+"))
    expect(page.locator(".slot").filter(has_text="paused")).to_have_count(1)
    expect(page.locator(".mix")).to_contain_text(" 1 paused: others go first.")
    slots(page).nth(3).click()
    expect(page.locator(".chosen")).to_contain_text(re.compile(r"call 0 of \d+, paused"))
    page.get_by_text("The slots as a table").click()
    expect(page.get_by_role("row").filter(has_text="paused")).to_have_count(1)
    page.get_by_role("button", name="Pause").click()
    check_accessibility(page)


def test_deadlines_are_told_by_words_and_not_by_colour_alone(serve, open_page):
    page = open_page(serve(num_slots=24).url)
    expect(page.locator(".due[data-urgency=late]").first).to_contain_text("late")
    expect(page.locator(".due[data-urgency=kept]").first).to_contain_text(" s")


def test_an_empty_wheel_says_how_to_fill_it_and_the_button_does(serve, open_page):
    served = serve(num_slots=4, arriving=False)
    page = open_page(served.url)
    expect(page.locator(".mix")).to_contain_text("Nothing is being drawn.")
    expect(page.locator("#curl")).to_contain_text(f"http://127.0.0.1:{served.port}/t2i")
    page.get_by_role("button", name="Send sample traffic").click()
    expect(page.locator("#sampling")).to_contain_text("20 of 20 requests sent, 20 drawn.")
    assert len({body["scheduler"] for body in served.drawn}) == 6
    assert len({body["inference_steps"] for body in served.drawn}) > 4
    assert {body.get("width") for body in served.drawn} == {None, 96}


def test_sample_traffic_is_stopped_by_the_same_button(serve, open_page):
    page = open_page(serve(num_slots=4, arriving=False).url)
    page.get_by_role("button", name="Send sample traffic").click()
    page.get_by_role("button", name="Stop sample traffic").click()
    expect(page.get_by_role("button", name="Send sample traffic")).to_be_visible()


def test_a_stream_that_breaks_is_opened_again(serve, open_page):
    served = serve(num_slots=4)
    page = open_page(served.url)
    expect(page.locator("#connection")).to_have_text("live")
    served.refusal = (503, "engine_unavailable", "no engine is ready.")
    served.life += 1
    expect(page.locator("#trouble")).to_contain_text("no engine is ready.")
    expect(page.locator("#trouble")).to_contain_text("Trying again in")
    expect(page.locator("#connection")).to_have_text("reconnecting")
    page.get_by_role("button", name="Try now").focus()
    served.refusal = None
    expect(page.locator("#connection")).to_have_text("live")
    expect(page.locator("#trouble")).to_be_hidden()
    expect(page.locator("#main")).to_be_focused()
    open_page.forgive(503)


def test_a_stream_that_is_switched_off_is_not_asked_for_again(serve, open_page):
    served = serve(num_slots=4)
    served.refusal = (404, "not_found", "/v1/live is switched off on this server.")
    page = open_page(served.url)
    expect(page.locator("#connection")).to_have_text("switched off")
    expect(page.locator("#trouble")).to_contain_text("/v1/live is switched off on this server.")
    expect(page.locator("#trouble")).not_to_contain_text("Trying again")
    page.wait_for_timeout(1500)  # it would have been asked again by now
    assert served.num_opened == 1
    open_page.forgive(404)


def test_a_server_that_wants_a_key_is_given_one(serve, open_page):
    served = serve(num_slots=4, key="nk-right")
    page = open_page(served.url)
    field = page.get_by_label("API key")
    expect(field).to_be_focused()
    expect(page.get_by_role("button", name="Send sample traffic")).to_be_disabled()
    expect(page.locator("#key-error")).to_be_empty()
    field.fill("nk-wrong")
    page.get_by_role("button", name="Show the wheel").click()
    expect(page.locator("#key-error")).to_contain_text("this server needs an API key.")
    expect(field).to_be_focused()
    field.fill("nk-right")
    field.press("Enter")
    expect(slots(page)).to_have_count(4)
    expect(field).to_be_hidden()
    expect(page.locator("#main")).to_be_focused()
    expect(page.get_by_role("button", name="Send sample traffic")).to_be_enabled()
    expect(page.locator("#curl")).to_contain_text('"authorization: Bearer $NORIA_API_KEY"')
    page.reload()
    expect(slots(page)).to_have_count(4)
    open_page.forgive(401)


def test_a_key_form_is_accessible(serve, open_page, check_accessibility):
    page = open_page(serve(key="nk-right").url)
    expect(page.get_by_label("API key")).to_be_visible()
    check_accessibility(page)
    open_page.forgive(401)


def test_engines_have_a_wheel_each_and_say_when_they_are_gone(serve, open_page):
    served = serve(num_slots=4, num_engines=2, states={"engine-1": "loading"})
    page = open_page(served.url)
    second = page.get_by_role("region", name="engine-1")
    expect(second).to_contain_text("engine-1 is loading its model")
    served.states = {}
    expect(second.get_by_role("list", name="Slots of engine-1").get_by_role("button")).to_have_count(4)
    served.states = {"engine-1": "unknown"}
    expect(second).to_contain_text("engine-1 cannot be reached.")
    expect(second.locator(".mix")).to_have_text("This is how it was when it was last heard of.")
    expect(page.get_by_role("region", name="engine-0").locator(".notice")).to_be_hidden()


def test_a_wheel_without_pictures_is_drawn_all_the_same(serve, open_page):
    page = open_page(serve(num_slots=8, pictures=False).url)
    expect(slots(page)).to_have_count(8)
    expect(page.locator(".gone .swatch").first).to_be_visible()


def test_the_first_summary_tells_of_all_engines_that_are_ready(serve, open_page):
    page = open_page(serve(num_slots=4, num_engines=2).url)
    expect(page.locator("#summary")).to_have_text(re.compile(r"^engine-0: .* engine-1: "))


def test_pause_closes_the_stream_and_stops_what_moves(serve, open_page):
    served = serve(num_slots=4)
    page = open_page(served.url, reduced_motion="no-preference")
    expect(page.locator("#connection")).to_have_text("live")
    page.get_by_role("button", name="Pause").click()
    expect(page.locator("#connection")).to_have_text("paused")
    before = page.evaluate(PICTURED)
    page.wait_for_timeout(700)
    assert page.evaluate(PICTURED) == before
    assert served.num_opened == 1
    page.get_by_role("button", name="Pause").click()
    expect(page.locator("#connection")).to_have_text("live")
    assert served.num_opened == 2


PICTURED = """() => [...document.querySelectorAll("canvas")].map((canvas) => canvas.toDataURL())"""


def test_it_fits_a_screen_320_px_wide(serve, open_page):
    page = open_page(serve(num_slots=12).url, viewport={"width": 320, "height": 640})
    expect(slots(page)).to_have_count(12)
    expect(page.locator(".gone li").first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") == 320


def test_64_slots_stay_smooth(serve, open_page):
    page = open_page(serve(num_slots=64).url, reduced_motion="no-preference")
    expect(slots(page)).to_have_count(64)
    browser = page.context.browser
    processes = browser.new_browser_cdp_session()
    browser.start_tracing(page=page, categories=["disabled-by-default-devtools.timeline"])
    before = busy_s(processes)
    frames = page.evaluate(FRAMES, 5)
    busy_ms = 1000 * (busy_s(processes) - before) / frames
    longest_task_ms = longest_task(json.loads(browser.stop_tracing())["traceEvents"])
    # Of the processors' time, not of the clock's, which goes on while a machine does other things: 13 and 20 ms, without a GPU.
    measured = f"{frames} frames of {busy_ms:.1f} ms each, longest task {longest_task_ms:.1f} ms"
    print(measured)
    assert busy_ms <= 50 and 0 < longest_task_ms <= 150, measured


def busy_s(processes):
    """Seconds of CPU that Chromium has spent on its page and on drawing it."""
    told = processes.send("SystemInfo.getProcessInfo")["processInfo"]
    return sum(each["cpuTime"] for each in told if each["type"] in ("renderer", "GPU"))


def longest_task(events):
    """Milliseconds of CPU of the longest task in the page's main thread."""
    named = (event for event in events if event["name"] == "thread_name")
    main = {(event["pid"], event["tid"]) for event in named if event["args"]["name"] == "CrRendererMain"}
    tasks = [event for event in events if event["name"] == "RunTask" and (event["pid"], event["tid"]) in main]
    return max(task.get("tdur", 0) for task in tasks) / 1000


FRAMES = """async (seconds) => {
  let frames = 0;
  await new Promise((resolve) => {
    const until = performance.now() + 1000 * seconds;
    const tick = (at) => (frames++, at < until ? requestAnimationFrame(tick) : resolve());
    requestAnimationFrame(tick);
  });
  return frames;
}"""
