"""A frame as a terminal of each size shows it."""

import io

import msgspec
import pytest
from fake_live_server import SERVER_TIME, SHARES, engine_view, slot_view
from rich.console import Console

from noria.cli.top.events import EngineInfo, EnginesEvent, EngineViewEvent, ServerInfo
from noria.cli.top.frame import render_frame
from noria.cli.top.server_state import ServerState
from noria.protocol.diffusion import ImageSettingsView
from noria.protocol.live_views import BatchView, CallSizeView, IterationView

FOOTER = ("q quits", "dim")
URL = "http://127.0.0.1:8000"


def state_of(*views, more_engines=(), models=("noria-shapes",)):
    state = ServerState()
    engine_infos = [EngineInfo(f"engine-{k}", "ready", "cpu", "incarnation-1") for k in range(len(views))]
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


def test_the_header_names_the_server():
    assert rendered_lines(state_of(engine_view()))[0] == "noria 9.9 · http://127.0.0.1:8000 · noria-shapes"


def test_an_engine_has_its_state_device_slots_queue_and_statistics():
    lines = rendered_lines(state_of(engine_view(slots=[slot_view(0), slot_view(1)], num_waiting=3)))
    assert lines[1] == "engine-0 ready · cpu · 2 of 8 slots · 3 waiting"
    assert lines[2] == (
        "images/s 4.21 · steps/s 88.4 · p50 1.9 s · p95 3.1 s · p99 4.0 s · batch 7.30 · backlog 4.5 s · busy 99% · "
        "occupancy 46%"
    )


def text_engine(height=None, **changes):
    iterations = tuple(
        IterationView(k, SERVER_TIME, 0.02, 0.0, 0.0, 1, 4, 4, batch=BatchView(0, "minilm", 30, 40)) for k in (1, 2)
    )
    state = ServerState()
    info = EngineInfo("engine-0", "ready", "cpu", "incarnation-1", "encoder")
    state.apply(EnginesEvent((info,), ServerInfo("9.9", ("minilm",))), 0.0)
    view = engine_view(num_slots=2, iterations=iterations, last_iteration=2, **changes)
    state.apply(EngineViewEvent("engine-0", view), 0.0)
    return rendered_lines(state, height=height)


def test_an_engine_of_text_encoders_has_texts_and_batches_and_neither_slots_nor_images():
    lines = text_engine(num_waiting=7)
    assert lines[1] == "engine-0 ready · cpu · 2 sessions · 7 texts waiting"
    assert lines[2].startswith("texts/s 4.21 · p50 1.9 s")
    assert lines[2].endswith("texts a batch 7.30 · backlog 4.5 s · busy 99% · padding 25%")
    assert [line.split()[0] for line in lines[3:5]] == ["texts", "batch"]
    assert not any("images" in line or "slot" in line or "denoise" in line for line in lines)


@pytest.mark.parametrize("height", range(2, 9))
def test_a_frame_of_text_encoders_fits_any_height(height):
    assert len(text_engine(height, num_waiting=9)) == height


def test_a_paused_image_has_no_finish_time():
    lines = rendered_lines(state_of(engine_view(slots=[slot_view(0), slot_view(1, paused=True)])))
    assert slot_line(lines, 0).split()[2:5] == ["5/20", "3.0", "s"]
    assert slot_line(lines, 1).split()[2:4] == ["5/20", "paused"]


def test_a_slot_shows_every_field_of_its_image():
    slot = slot_view(2, index=1, deadline_at=SERVER_TIME + 5, priority="high")
    line = slot_line(rendered_lines(state_of(engine_view(slots=[slot])), width=130), 2)
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
def test_slots_show_their_model_if_there_are_several(width):
    slots = [slot_view(slot, model=TWO[slot % 2]) for slot in range(4)]
    lines = rendered_lines(state_of(engine_view(4, slots), models=TWO), width)
    heading = next(line for line in lines if line.startswith("# "))
    column = heading.index("model")
    assert [slot_line(lines, slot)[column : column + 14].rstrip() for slot in range(4)] == [
        "noria-shapes",
        "stable-…se-1.0",
    ] * 2
    assert "scheduler" in heading or width < 80


def test_waiting_requests_show_their_model_if_there_are_several():
    states = [state_of(engine_view(num_waiting=1), models=models) for models in (TWO, TWO[:1])]
    waiting = [next(line for line in rendered_lines(state) if line.startswith("waits")) for state in states]
    assert waiting == [
        "waits 64×64 starts now 25 steps euler noria-shapes wait-0",
        "waits 64×64 starts now 25 steps euler wait-0",
    ]


def test_shares_of_several_clients_say_who_runs_and_who_waits_for_what():
    waiting = engine_view(num_waiting=1).waiting[0]
    waiting = msgspec.structs.replace(waiting, share_client="alice")
    slots = [slot_view(0, share_client="alice"), slot_view(1)]
    view = engine_view(slots=slots, num_waiting=1, waiting=(waiting,), shares=SHARES)
    lines = rendered_lines(state_of(view), width=160)
    assert [" ".join(line.split()) for line in lines[3:6]] == [
        "alice ███████▌···· 62% 4 run · 2 paused · 3 evicted · 9 waiting",
        "a-name-of-…t-is-long ███▋········ 30% 2 run",
        "2 others █··········· 8% 0 run · 2 waiting",
    ]
    assert [" alice" in slot_line(lines, 0), " another" in slot_line(lines, 1)] == [True, True]
    assert next(line for line in lines if line.startswith("waits")).endswith("euler of alice wait-0")
    alone = rendered_lines(state_of(engine_view(slots=slots, shares=SHARES[:1])), width=160)
    assert not any("alice" in line for line in alone)


@pytest.mark.parametrize(("height", "num_lines"), [(40, 3), (19, 1), (14, 1), (8, 0)])
def test_shares_take_one_line_where_there_is_little_room_and_then_none(height, num_lines):
    lines = rendered_lines(state_of(engine_view(shares=SHARES)), 80, height)
    assert len(lines) == height
    assert sum("62%" in line or "30%" in line or "8%" in line for line in lines) == num_lines
    if num_lines == 1:
        assert "shares · alice 62% · a-name-of-a-key-that-is-long 30% · 2 others 8%" in lines


def test_times_count_down_between_two_views():
    line = slot_line(
        rendered_lines(state_of(engine_view(slots=[slot_view(0, deadline_at=SERVER_TIME + 5)])), now=2.0), 0
    )
    assert "1.0 s" in line and "3.0 s" in line
    line = slot_line(
        rendered_lines(state_of(engine_view(slots=[slot_view(0, deadline_at=SERVER_TIME + 5)])), now=9.0), 0
    )
    assert "now" in line and "late" in line


def test_a_freed_slot_shows_the_outcome_for_a_few_seconds():
    state = state_of(engine_view(num_slots=8))
    assert slot_line(rendered_lines(state, now=1.0), 7).split() == ["7", "ok"]
    assert set(slot_line(rendered_lines(state, now=9.0), 7).split()[1]) == {"·"}


def test_the_queue_is_in_order_and_ends_with_the_number_of_further_images():
    lines = rendered_lines(state_of(engine_view(num_waiting=20)))
    waiting = [line for line in lines if line.startswith("waits")]
    assert waiting[0].split() == ["waits", "64×64", "starts", "now", "25", "steps", "euler", "wait-0"]
    assert waiting[1].split() == ["waits", "64×64", "starts", "in", "1.0", "s", "25", "steps", "euler", "wait-1"]
    assert lines[lines.index(waiting[-1]) + 1] == f"… and {20 - len(waiting)} more images"


def test_iterations_are_plotted_by_stage():
    lines = rendered_lines(state_of(engine_view()), width=60)
    curves = {
        line[:12].strip(): line[12:]
        for line in lines
        if line[:12].strip() in ("text encode", "img encode", "denoise", "decode", "batch")
    }
    assert "img encode" not in curves  # there is no start image
    # 40 columns, one iteration each; the scale is the longest iteration.
    assert all(curve.endswith("30 ms") for name, curve in curves.items() if name != "batch")
    assert curves["text encode"][:40].count("▃") == sum(k % 7 == 0 for k in range(61, 101))
    assert curves["decode"][:40].count("▆") == sum(k % 5 == 0 for k in range(61, 101))
    assert curves["batch"].endswith("of 8")


def test_start_images_have_a_curve_of_their_own():
    iterations = [IterationView(k, float(k), 0.03, 0.0, 0.0, 0, 1, 0, image_encode_s=0.015) for k in range(50)]
    lines = rendered_lines(state_of(engine_view(iterations=tuple(iterations))), width=60)
    curves = {line[:12].strip(): line[12:52] for line in lines}
    assert curves["img encode"] == curves["denoise"] == "▄" * 40


def test_calls_of_several_sizes_are_counted_with_their_padding():
    sizes = (CallSizeView(64, 64, 2), CallSizeView(64, 32, 2))
    iterations = [
        IterationView(k, float(k), 0.03, 0.0, 0.0, 0, k % 2, 0, call_sizes=sizes if k == 3 else ()) for k in range(8)
    ]
    lines = rendered_lines(state_of(engine_view(iterations=tuple(iterations))), width=200)
    assert lines[2].endswith("occupancy 46% · mixed sizes 25% · of it padding 25%")


@pytest.mark.parametrize("width", [40, 60, 61, 80, 100, 133, 250])
@pytest.mark.parametrize("height", [6, 15, 24, 50, 100])
@pytest.mark.parametrize("num_slots", [1, 2, 16, 64, 256])
@pytest.mark.parametrize("num_engines", [1, 3])
def test_a_frame_has_the_requested_size(width, height, num_slots, num_engines):
    views = [engine_view(num_slots, [slot_view(slot) for slot in range(num_slots)], num_waiting=9)] * num_engines
    rows = render_frame(state_of(*views, models=TWO[:num_engines]), URL, FOOTER, width, height, 0.0)
    assert len(rows) == height
    assert {row.cell_len for row in rows} == {width}
    assert rows[-1].plain.startswith("q quits")


@pytest.mark.parametrize(("width", "height"), [(60, 15), (80, 24), (100, 30), (200, 50)])
@pytest.mark.parametrize("num_slots", [1, 8, 16, 64])
@pytest.mark.parametrize("models", [TWO[:1], TWO])
def test_every_slot_is_visible_at_every_size(width, height, num_slots, models):
    slots = [slot_view(slot, call=20) for slot in range(num_slots)]
    text = "\n".join(
        rendered_lines(state_of(engine_view(num_slots, slots, num_waiting=9), models=models), width, height)
    )
    for slot in range(num_slots):
        assert f" {slot} ██" in text.replace("\n", "\n "), slot
    assert "waits" in text


def test_very_many_slots_are_a_character_each():
    slots = [slot_view(slot, call=10) for slot in range(250)]
    lines = rendered_lines(state_of(engine_view(256, slots)), 60, 15)
    assert sum(line.count("▄") for line in lines if set(line) <= set("▄·")) == 250


def test_slots_without_room_are_counted():
    assert "… and 96 more slots" in rendered_lines(state_of(engine_view(256, [slot_view(255)])), 40, 10)
    assert not any("more slots" in line for line in rendered_lines(state_of(engine_view(256)), 40, 10))  # none is used


def test_engines_share_the_screen_and_loading_ones_get_one_line():
    loading = EngineInfo("engine-9", "loading")
    lines = rendered_lines(state_of(engine_view(16), engine_view(16), more_engines=[loading]), 80, 40)
    assert [line.split()[0] for line in lines if line.startswith("engine-")] == ["engine-0", "engine-1", "engine-9"]
    assert lines[0] == "noria 9.9 · http://127.0.0.1:8000 · 8.42 images/s, 177 steps/s in all · noria-s…"
    # Slot 0 of each engine has a line of its own.
    assert sum(line.startswith(" 0 ·") for line in lines) == 2


def test_engines_without_room_are_counted():
    views = [engine_view(4)] * 12
    assert any("more engines" in line for line in rendered_lines(state_of(*views), 60, 8))


def test_server_text_never_reaches_the_terminal_as_control_codes():
    evil = "\x1b]0;owned\x07\x9b2J\r\n\u202e"
    slot = slot_view(0, request_id=evil, settings=ImageSettingsView(8, 8, evil, 1.0, 1))
    state = ServerState()
    state.apply(EnginesEvent((EngineInfo(evil, "ready", evil, "incarnation-1"),), ServerInfo(evil, (evil,))), 0.0)
    state.apply(EngineViewEvent(evil, engine_view(slots=[slot], incarnation="incarnation-1")), 0.0)
    for size in ((60, 15), (200, 50), (200, None)):
        text = "".join(row.plain for row in render_frame(state, evil, (evil, "red"), *size, 0.0))
        assert not set(text) & set("\x1b\x07\x9b\r\n\u202e")
        assert r"\x1b]0;owned" in text
