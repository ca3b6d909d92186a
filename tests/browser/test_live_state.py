"""The pure modules of the live page, imported by Chromium."""

import feed
import pytest

pytestmark = pytest.mark.browser

SETTINGS = {"width": 64, "height": 64, "scheduler": "ddim", "guidance_scale": 3, "inference_steps": 4, "loras": []}
IMAGE = {
    "slot": 0, "request_id": "a", "index": 0, "model": "m", "settings": SETTINGS,
    "call": 1, "num_calls": 4, "priority": "normal", "joined_at": 100.0, "deadline_at": None, "finish_at": None,
}  # fmt: skip
RATES = {"window_s": 10, "requests_per_s": 0, "images_per_s": 0, "steps_per_s": 0, "p50_s": None, "p95_s": None, "p99_s": None,
         "mean_batch": 0, "occupancy": 0, "busy": 0}  # fmt: skip


def view(at, slots=(), departures=(), iterations=(), **more):
    return {
        "engine": "engine-0", "incarnation": "first", "captured_at": at, "last_iteration": 1, "num_slots": 4, "slots": list(slots), "waiting": [],
        "num_waiting": 0, "backlog_s": 0, "iterations": list(iterations), "departures": list(departures), "rates": RATES,
        "thumbnails": [],
    } | more  # fmt: skip


def iteration(number, started_at, **more):
    return {"number": number, "started_at": started_at, "duration_s": 0.1, "text_encode_s": 0, "decode_s": 0, "num_joined": 0,
            "num_stepped": 1, "num_decoded": 0} | more  # fmt: skip


def departure(number, request_id="a", slot=0, outcome="ok"):
    return {"iteration": number, "slot": slot, "request_id": request_id, "index": 0, "outcome": outcome}


@pytest.fixture
def run(open_page):
    """Evaluate JavaScript in a page, which can import the modules."""
    with feed.served(feed.Feed(arriving=False)) as served:
        page = open_page(served.url)
        yield page.evaluate
        page.close()  # before the server stops: a page that cannot reconnect logs errors


@pytest.fixture
def view_after(run):
    def reduce(*views):
        return run(
            """async (views) => {
                const { initialState, reduce } = await import("/pages/live/state.js");
                const engines = [{ name: "engine-0", state: "ready", device: "cpu", incarnation: "first" }];
                const frozen = (value) => (value && typeof value === "object" ? (Object.values(value).forEach(frozen), Object.freeze(value)) : value);
                let state = reduce(initialState, { name: "engines", data: { engines, server: {} }, at: 0 });
                for (const data of views) state = reduce(frozen(state), frozen({ name: "engine_view", data, at: data.captured_at - 90 }));
                return state.engines[0].view;
            }""",
            list(views),
        )

    return reduce


def test_bar_begins_when_its_image_joins_and_ends_with_its_last_iteration(view_after):
    result = view_after(view(100.2, [IMAGE]), view(100.6, departures=[departure(7)], iterations=[iteration(7, 100.4)]))
    (bar,) = result["bars"]
    assert (bar["from"], bar["to"], bar["outcome"]) == (100.0, pytest.approx(100.5), "ok")
    assert [image["settings"]["scheduler"] for image in result["departures"]] == ["ddim"]


def test_bar_of_a_running_image_is_open(view_after):
    (bar,) = view_after(view(100.2, [IMAGE]), view(100.4, [IMAGE | {"call": 2}]))["bars"]
    assert bar["to"] is None


def test_image_that_joins_and_leaves_between_two_views_has_a_bar_without_details(view_after):
    result = view_after(
        view(100.2), view(100.6, departures=[departure(7, "quick", slot=2)], iterations=[iteration(7, 100.4)])
    )
    (bar,) = result["bars"]
    assert (bar["slot"], bar["settings"], bar["from"], bar["to"]) == (2, None, 100.2, pytest.approx(100.5))


def test_image_missing_without_a_departure_has_left_at_that_view(view_after):
    (bar,) = view_after(view(100.2, [IMAGE]), view(101.0))["bars"]
    assert (bar["to"], bar["outcome"]) == (101.0, None)


def test_restart_of_an_engine_closes_all_bars(view_after):
    result = view_after(view(100.2, [IMAGE], iterations=[iteration(1, 100.1)]), view(105.0, incarnation="second"))
    (bar,) = result["bars"]
    assert (bar["to"], bar["outcome"]) == (100.2, "engine_lost")
    assert result["iterations"] == []


def test_iterations_repeated_after_a_reconnect_are_counted_once(view_after):
    first = [iteration(number, 100 + number / 10) for number in range(1, 4)]
    complete = [*first, *(iteration(number, 100 + number / 10) for number in range(4, 7))]
    result = view_after(view(100.4, iterations=first), view(100.7, iterations=complete))
    assert [each["number"] for each in result["iterations"]] == [1, 2, 3, 4, 5, 6]


def test_only_the_last_30_seconds_are_kept(view_after):
    result = view_after(
        view(100.2, [IMAGE], iterations=[iteration(1, 100.1)]),
        view(100.6, departures=[departure(1)]),
        view(140.0, iterations=[iteration(2, 139.0)]),
    )
    assert result["bars"] == []
    assert [each["number"] for each in result["iterations"]] == [2]


def test_view_with_the_least_delay_sets_the_clock(view_after):
    assert view_after(view(100.2), view(100.4))["clock_offset_s"] == pytest.approx(-90.0, abs=0.01)


def test_schedulers_keep_their_hues(run):
    hues = run(
        """async ([first, second]) => {
            const { initialState, reduce } = await import("/pages/live/state.js");
            return [first, second].reduce((state, data) => reduce(state, { name: "engine_view", data, at: 0 }), initialState).hues;
        }""",
        [
            view(1, [IMAGE | {"settings": SETTINGS | {"scheduler": "heun"}}]),
            view(2, [IMAGE, IMAGE | {"settings": SETTINGS | {"scheduler": "heun"}}]),
        ],
    )
    assert hues == {"heun": 1, "ddim": 2}


def test_unknown_event_changes_nothing(run):
    assert run(
        """async () => {
            const { initialState, reduce } = await import("/pages/live/state.js");
            return reduce(initialState, { name: "weather", data: {} }) === initialState;
        }"""
    )


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        ({"deadline_at": None}, None),
        ({"deadline_at": 110.0}, "kept"),
        ({"deadline_at": 101.0}, "close"),
        ({"deadline_at": 110.0, "finish_at": 111.0}, "late"),
        ({"deadline_at": 99.0}, "late"),
    ],
)
def test_state_of_a_deadline(run, image, expected):
    call = "async (image) => (await import('/pages/shared/format.js')).deadlineState(image, 100)"
    assert run(call, IMAGE | {"joined_at": 90.0} | image) == expected


def test_iteration_is_spread_over_its_bins(run):
    bins = run(
        "async (iterations) => [...(await import('/pages/live/timeline.js')).binIterations(iterations)]",
        [iteration(1, 10.125, duration_s=0.25, text_encode_s=0.03, decode_s=0.1) | {"image_encode_s": 0.02}],
    )
    assert [bin_ for bin_, _ in bins] == [40, 41]
    for _, shares in bins:
        assert shares == pytest.approx([0.04, 0.06, 0.2, 0.2])


@pytest.mark.parametrize("width", [280, 500, 1200])
def test_slots_do_not_overlap_each_other_or_the_hub(run, width):
    overlapping = run(
        """async (width) => {
            const { slotLayout } = await import("/pages/live/slots.js");
            const overlapping = [];
            for (let num = 1; num <= 96; num++) {
                const { kind, centers, size, height, center, hub } = slotLayout(num, width);
                const apart = ([a, b]) => Math.hypot(a.x - b.x, a.y - b.y) >= size;
                const inside = ({ x, y }) => x >= size / 2 && x <= width - size / 2 && y >= size / 2 && y <= height - size / 2;
                const above = ({ x, y }) => kind === "ring" && Math.abs(x - center.x) < 1 && y < center.y;
                const below = (slot) => !above(slot) || slot.y + size / 2 + 32 <= center.y - hub; // its label ends before the hub
                const pairs = centers.flatMap((a, k) => centers.slice(k + 1).map((b) => [a, b]));
                if (centers.length !== num || !pairs.every(apart) || !centers.every(inside) || !centers.every(below)) overlapping.push(num);
            }
            return overlapping;
        }""",
        width,
    )
    assert overlapping == []


def test_backoff_grows_and_has_jitter(run):
    waits = run(
        """async () => {
            const { backoffSeconds } = await import("/pages/live/live_stream.js");
            return [backoffSeconds(1, 0), backoffSeconds(1, 1), backoffSeconds(3, 0.5), backoffSeconds(50, 1)];
        }"""
    )
    assert waits == pytest.approx([0.375, 0.625, 2.0, 12.5])


def test_of_hundreds_of_slots_those_are_shown_that_were_used(view_after):
    first, last = view(100.0, [IMAGE | {"slot": 70}], num_slots=512), view(101.0, num_slots=512)
    assert [view_after(*views)["num_shown"] for views in ([last], [first], [first, last])] == [64, 128, 128]
    assert view_after(view(100.0))["num_shown"] == 4
