"""A frame as a terminal of each size shows it."""

import io

import pytest
from rich.console import Console
from showing import SERVER_TIME, engine_view, slot_view

from noria.cli.top.events import EngineInfo, EnginesEvent, EngineViewEvent, ServerInfo
from noria.cli.top.frame import render_frame
from noria.cli.top.server_state import ServerState

FOOTER = ("q leaves", "dim")
URL = "http://127.0.0.1:8000"


def state_of(*views, more_engines=(), models=("noria-shapes",)):
    state = ServerState()
    engine_infos = [EngineInfo(f"engine-{k}", "ready", "cpu", "life-1") for k in range(len(views))]
    state.apply(EnginesEvent((*engine_infos, *more_engines), ServerInfo("9.9", models)), 0.0)
    for engine, view in zip(engine_infos, views, strict=True):
        state.apply(EngineViewEvent(engine.name, view), 0.0)
    return state


def rendered_lines(state, width=120, height=None, now=0.0):
    """The lines as a real console prints them."""
    rows = render_frame(state, URL, FOOTER, width, height, now)
    console = Console(record=True, width=width, file=io.StringIO(), color_system=None)
    for row in rows:
        console.print(row)
    return [line.rstrip() for line in console.export_text().split("\n")[:-1]]


def slot_line(lines, slot):
    return next(line for line in lines if line.startswith(f"{slot} "))


def test_the_head_says_which_server():
    assert rendered_lines(state_of(engine_view()))[0] == "noria 9.9 · http://127.0.0.1:8000 · noria-shapes"


def test_an_engine_says_its_state_device_slots_queue_and_figures():
    lines = rendered_lines(state_of(engine_view(slots=[slot_view(0), slot_view(1)], num_waiting=3)))
    assert lines[1] == "engine-0 ready · cpu · 2 of 8 slots · 3 waiting"
    assert lines[2] == (
        "images/s 4.21 · steps/s 88.4 · p50 1.9 s · p95 3.1 s · p99 4.0 s · batch 7.30 · drain 4.5 s · busy 99% · occupancy 46%"
    )


def test_a_slot_whose_image_is_paused_says_so_instead_of_when_it_is_done():
    lines = rendered_lines(state_of(engine_view(slots=[slot_view(0), slot_view(1, paused=True)])))
    assert slot_line(lines, 0).split()[2:5] == ["5/20", "3.0", "s"]
    assert slot_line(lines, 1).split()[2:4] == ["5/20", "paused"]


def test_a_slot_says_everything_of_its_image():
    seat = slot_view(2, index=1, due_at=SERVER_TIME + 5, priority="high")
    line = slot_line(rendered_lines(state_of(engine_view(slots=[seat])), width=130), 2)
    assert line.split() == (
        [
            "2",
            "██████··················",
            "5/20",
            "3.0",
            "s",
            "5.0",
            "s",
            "64×48",
            "dpm++2m-karras",
            "20",
            "7.50",
            "high",
            "req-2[1]",
        ]
    )


TWO = ("noria-shapes", "stable-diffusion-xl-base-1.0")


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_each_slot_says_its_model_where_there_are_several(width):
    seats = [slot_view(slot, model=TWO[slot % 2]) for slot in range(4)]
    lines = rendered_lines(state_of(engine_view(4, seats), models=TWO), width)
    heading = next(line for line in lines if line.startswith("# "))
    column = heading.index("model")
    assert [slot_line(lines, slot)[column : column + 14].rstrip() for slot in range(4)] == [
        "noria-shapes",
        "stable-…se-1.0",
    ] * 2
    assert "scheduler" in heading or width < 80


def test_a_waiting_request_names_its_model_where_there_are_several():
    said = [state_of(engine_view(num_waiting=1), models=models) for models in (TWO, TWO[:1])]
    waiting = [next(line for line in rendered_lines(board) if line.startswith("waits")) for board in said]
    assert waiting == [
        "waits 64×64 boards now 25 steps euler noria-shapes wait-0",
        "waits 64×64 boards now 25 steps euler wait-0",
    ]


def test_time_goes_on_between_two_views():
    line = slot_line(rendered_lines(state_of(engine_view(slots=[slot_view(0, due_at=SERVER_TIME + 5)])), now=2.0), 0)
    assert "1.0 s" in line and "3.0 s" in line
    line = slot_line(rendered_lines(state_of(engine_view(slots=[slot_view(0, due_at=SERVER_TIME + 5)])), now=9.0), 0)
    assert "now" in line and "late" in line


def test_a_slot_that_was_left_says_how_for_a_moment():
    board = state_of(engine_view(num_slots=8))
    assert slot_line(rendered_lines(board, now=1.0), 7).split() == ["7", "ok"]
    assert set(slot_line(rendered_lines(board, now=9.0), 7).split()[1]) == {"·"}


def test_the_queue_is_in_its_order_and_says_how_many_more_there_are():
    lines = rendered_lines(state_of(engine_view(num_waiting=20)))
    waiting = [line for line in lines if line.startswith("waits")]
    assert waiting[0].split() == ["waits", "64×64", "boards", "now", "25", "steps", "euler", "wait-0"]
    assert waiting[1].split() == ["waits", "64×64", "boards", "in", "1.0", "s", "25", "steps", "euler", "wait-1"]
    assert lines[lines.index(waiting[-1]) + 1] == f"… and {20 - len(waiting)} images more"


def test_iterations_are_plotted_by_stage():
    lines = rendered_lines(state_of(engine_view()), width=60)
    curves = {
        line[:9].strip(): line[9:] for line in lines if line[:9].strip() in ("encode", "denoise", "decode", "batch")
    }
    # 43 columns, a turn each; the scale is the longest turn.
    assert all(curve.endswith("30 ms") for name, curve in curves.items() if name != "batch")
    assert curves["encode"][:43].count("▃") == sum(k % 7 == 0 for k in range(58, 101))
    assert curves["decode"][:43].count("▆") == sum(k % 5 == 0 for k in range(58, 101))
    assert curves["batch"].endswith("of 8")


@pytest.mark.parametrize("width", [40, 60, 61, 80, 100, 133, 250])
@pytest.mark.parametrize("height", [6, 15, 24, 50, 100])
@pytest.mark.parametrize("num_slots", [1, 2, 16, 64, 256])
@pytest.mark.parametrize("num_engines", [1, 3])
def test_a_frame_is_as_large_as_asked(width, height, num_slots, num_engines):
    views = [engine_view(num_slots, [slot_view(slot) for slot in range(num_slots)], num_waiting=9)] * num_engines
    rows = render_frame(state_of(*views, models=TWO[:num_engines]), URL, FOOTER, width, height, 0.0)
    assert len(rows) == height
    assert {row.cell_len for row in rows} == {width}
    assert rows[-1].plain.startswith("q leaves")


@pytest.mark.parametrize(("width", "height"), [(60, 15), (80, 24), (100, 30), (200, 50)])
@pytest.mark.parametrize("num_slots", [1, 8, 16, 64])
@pytest.mark.parametrize("models", [TWO[:1], TWO])
def test_every_slot_is_seen_at_every_size(width, height, num_slots, models):
    seats = [slot_view(slot, call=20) for slot in range(num_slots)]
    text = "\n".join(
        rendered_lines(state_of(engine_view(num_slots, seats, num_waiting=9), models=models), width, height)
    )
    for slot in range(num_slots):
        assert f" {slot} ██" in text.replace("\n", "\n "), slot
    assert "waits" in text


def test_more_slots_than_columns_have_room_for_are_a_character_each():
    seats = [slot_view(slot, call=10) for slot in range(250)]
    lines = rendered_lines(state_of(engine_view(256, seats)), 60, 15)
    assert sum(line.count("▄") for line in lines if set(line) <= set("▄·")) == 250


def test_slots_that_cannot_be_shown_at_all_are_counted():
    lines = rendered_lines(state_of(engine_view(256)), 40, 10)
    assert "… and 96 more slots" in lines


def test_engines_share_the_screen_and_loading_ones_have_their_line():
    loading = EngineInfo("engine-9", "loading")
    lines = rendered_lines(state_of(engine_view(16), engine_view(16), more_engines=[loading]), 80, 40)
    assert [line.split()[0] for line in lines if line.startswith("engine-")] == ["engine-0", "engine-1", "engine-9"]
    assert lines[0] == "noria 9.9 · http://127.0.0.1:8000 · 8.42 images/s, 177 steps/s in all · noria-s…"
    # Slots of each have a line of their own, which one engine alone could not have had twice.
    assert sum(line.startswith(" 0 ·") for line in lines) == 2


def test_engines_without_room_are_counted():
    views = [engine_view(4)] * 12
    assert any("more engines" in line for line in rendered_lines(state_of(*views), 60, 8))


def test_server_text_never_reaches_the_terminal_as_control_codes():
    evil = "\x1b]0;owned\x07\x9b2J\r\n\u202e"
    seat = slot_view(0, request_id=evil, scheduler=evil)
    board = ServerState()
    board.apply(EnginesEvent((EngineInfo(evil, "ready", evil, "life-1"),), ServerInfo(evil, (evil,))), 0.0)
    board.apply(EngineViewEvent(evil, engine_view(slots=[seat], incarnation="life-1")), 0.0)
    for size in ((60, 15), (200, 50), (200, None)):
        text = "".join(row.plain for row in render_frame(board, evil, (evil, "red"), *size, 0.0))
        assert not set(text) & set("\x1b\x07\x9b\r\n\u202e")
        assert r"\x1b]0;owned" in text
