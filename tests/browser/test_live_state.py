"""The page's pure modules, imported by Chromium: what is known after each event, and what follows from it."""

import feed
import pytest

pytestmark = pytest.mark.browser

SEAT = {
    "slot": 0, "request_id": "a", "index": 0, "model": "m", "width_px": 64, "height_px": 64, "scheduler": "ddim", "guidance_scale": 3,
    "num_steps": 4, "call": 1, "num_calls": 4, "priority": "normal", "boarded_at": 100.0, "due_at": None, "finish_at": None,
}  # fmt: skip
RATES = {"window_s": 10, "requests_per_s": 0, "images_per_s": 0, "steps_per_s": 0, "p50_s": None, "p95_s": None, "p99_s": None,
         "mean_batch": 0, "occupancy": 0, "busy": 0}  # fmt: skip


def view(at, seats=(), left=(), turns=(), **more):
    return {
        "engine": "engine-0", "incarnation": "first", "at": at, "number": 1, "num_slots": 4, "seats": list(seats), "waiting": [],
        "num_waiting": 0, "drain_s": 0, "turns": list(turns), "left": list(left), "rates": RATES, "cells": [],
    } | more  # fmt: skip


def turn(number, began_at, **more):
    return {"number": number, "began_at": began_at, "seconds": 0.1, "encode_s": 0, "decode_s": 0, "num_boarded": 0,
            "num_stepped": 1, "num_decoded": 0} | more  # fmt: skip


def left(number, request_id="a", slot=0, outcome="ok"):
    return {"number": number, "slot": slot, "request_id": request_id, "index": 0, "outcome": outcome}


@pytest.fixture
def run(open_page):
    """Evaluate JavaScript in a page whose modules are at hand."""
    with feed.served(feed.Feed(arriving=False)) as served:
        page = open_page(served.url)
        yield page.evaluate
        page.close()  # before its server: a page that looks for it in vain logs that


@pytest.fixture
def wheel_after(run):
    def reduced(*views):
        return run(
            """async (views) => {
                const { initial, reduce } = await import("/pages/state.js");
                const engines = [{ name: "engine-0", state: "ready", device: "cpu", incarnation: "first" }];
                const frozen = (value) => (value && typeof value === "object" ? (Object.values(value).forEach(frozen), Object.freeze(value)) : value);
                let state = reduce(initial, { name: "engines", data: { engines, server: {} }, at: 0 });
                for (const data of views) state = reduce(frozen(state), frozen({ name: "wheel", data, at: data.at - 90 }));
                return state.engines[0].wheel;
            }""",
            list(views),
        )

    return reduced


def test_a_bar_begins_when_its_image_boards_and_ends_with_the_turn_after_which_it_left(wheel_after):
    wheel = wheel_after(view(100.2, [SEAT]), view(100.6, left=[left(7)], turns=[turn(7, 100.4)]))
    (bar,) = wheel["bars"]
    assert (bar["from"], bar["to"], bar["outcome"]) == (100.0, pytest.approx(100.5), "ok")
    assert [image["scheduler"] for image in wheel["gone"]] == ["ddim"]


def test_a_bar_of_who_is_seated_is_open(wheel_after):
    (bar,) = wheel_after(view(100.2, [SEAT]), view(100.4, [SEAT | {"call": 2}]))["bars"]
    assert bar["to"] is None


def test_who_came_and_went_between_two_views_has_a_bar_that_says_no_more_than_that(wheel_after):
    wheel = wheel_after(view(100.2), view(100.6, left=[left(7, "quick", slot=2)], turns=[turn(7, 100.4)]))
    (bar,) = wheel["bars"]
    assert (bar["slot"], bar["scheduler"], bar["from"], bar["to"]) == (2, None, 100.2, pytest.approx(100.5))


def test_who_vanished_without_a_word_has_left_at_the_view_that_lacks_him(wheel_after):
    (bar,) = wheel_after(view(100.2, [SEAT]), view(101.0))["bars"]
    assert (bar["to"], bar["outcome"]) == (101.0, None)


def test_an_engines_next_life_ends_the_bars_of_the_last(wheel_after):
    wheel = wheel_after(view(100.2, [SEAT], turns=[turn(1, 100.1)]), view(105.0, incarnation="second"))
    (bar,) = wheel["bars"]
    assert (bar["to"], bar["outcome"]) == (100.2, "engine_lost")
    assert wheel["turns"] == []


def test_the_first_view_after_a_lost_connection_is_whole_and_its_turns_are_counted_once(wheel_after):
    first = [turn(number, 100 + number / 10) for number in range(1, 4)]
    whole = [*first, *(turn(number, 100 + number / 10) for number in range(4, 7))]
    wheel = wheel_after(view(100.4, turns=first), view(100.7, turns=whole))
    assert [one["number"] for one in wheel["turns"]] == [1, 2, 3, 4, 5, 6]


def test_what_is_older_than_half_a_minute_is_forgotten(wheel_after):
    wheel = wheel_after(
        view(100.2, [SEAT], turns=[turn(1, 100.1)]), view(100.6, left=[left(1)]), view(140.0, turns=[turn(2, 139.0)])
    )
    assert wheel["bars"] == []
    assert [one["number"] for one in wheel["turns"]] == [2]


def test_the_quickest_view_sets_the_clock(wheel_after):
    assert wheel_after(view(100.2), view(100.4))["lag_s"] == pytest.approx(-90.0, abs=0.01)


def test_schedulers_keep_their_colours(run):
    hues = run(
        """async ([first, second]) => {
            const { initial, reduce } = await import("/pages/state.js");
            return [first, second].reduce((state, data) => reduce(state, { name: "wheel", data, at: 0 }), initial).hues;
        }""",
        [
            view(1, [SEAT | {"scheduler": "heun"}]),
            view(2, [SEAT | {"scheduler": "ddim"}, SEAT | {"scheduler": "heun"}]),
        ],
    )
    assert hues == {"heun": 1, "ddim": 2}


def test_an_event_of_a_newer_server_changes_nothing(run):
    assert run(
        """async () => {
            const { initial, reduce } = await import("/pages/state.js");
            return reduce(initial, { name: "weather", data: {} }) === initial;
        }"""
    )


@pytest.mark.parametrize(
    ("seat", "expected"),
    [
        ({"due_at": None}, None),
        ({"due_at": 110.0}, "kept"),
        ({"due_at": 101.0}, "close"),
        ({"due_at": 110.0, "finish_at": 111.0}, "late"),
        ({"due_at": 99.0}, "late"),
    ],
)
def test_a_deadline_presses_more_as_it_comes_near(run, seat, expected):
    call = "async (seat) => (await import('/pages/words.js')).urgency(seat, 100)"
    assert run(call, SEAT | {"boarded_at": 90.0} | seat) == expected


def test_a_turn_is_spread_over_the_quarters_of_a_second_in_which_it_was(run):
    bins = run(
        "async (turns) => [...(await import('/pages/timeline.js')).binned(turns)]",
        [turn(1, 10.125, seconds=0.25, encode_s=0.05, decode_s=0.1)],
    )
    assert [bin_ for bin_, _ in bins] == [40, 41]
    for _, shares in bins:
        assert shares == pytest.approx([0.1, 0.2, 0.2])


@pytest.mark.parametrize("width", [280, 500, 1200])
def test_no_slot_overlaps_another_or_the_hub(run, width):
    crowded = run(
        """async (width) => {
            const { places } = await import("/pages/places.js");
            const crowded = [];
            for (let num = 1; num <= 96; num++) {
                const { kind, spots, size, height, middle, hub } = places(num, width);
                const apart = ([a, b]) => Math.hypot(a.x - b.x, a.y - b.y) >= size;
                const inside = ({ x, y }) => x >= size / 2 && x <= width - size / 2 && y >= size / 2 && y <= height - size / 2;
                const above = ({ x, y }) => kind === "ring" && Math.abs(x - middle.x) < 1 && y < middle.y;
                const below = (spot) => !above(spot) || spot.y + size / 2 + 32 <= middle.y - hub; // its label ends before the hub
                const pairs = spots.flatMap((a, k) => spots.slice(k + 1).map((b) => [a, b]));
                if (spots.length !== num || !pairs.every(apart) || !spots.every(inside) || !spots.every(below)) crowded.push(num);
            }
            return crowded;
        }""",
        width,
    )
    assert crowded == []


def test_waits_grow_and_differ(run):
    waits = run(
        """async () => {
            const { backoff } = await import("/pages/stream.js");
            return [backoff(1, 0), backoff(1, 1), backoff(3, 0.5), backoff(50, 1)];
        }"""
    )
    assert waits == pytest.approx([0.375, 0.625, 2.0, 12.5])
