"""`noria top` before a real server that draws. With NORIA_SCREENSHOTS set it also writes the picture of the documentation."""

import concurrent.futures
import json
import os
import pathlib
import random
import re
import shutil
import subprocess
import sys
import threading
import time
import urllib.request

import pytest
from picturing import svg_of

from noria import __version__
from noria.bench.server import DIRECT, running_server
from noria.models.catalog import BUNDLED
from noria.top.board import Board
from noria.top.events import Reader
from noria.top.frame import frame
from waiting import until

pytestmark = pytest.mark.slow

PICTURE = pathlib.Path(__file__).parents[2] / "docs" / "images" / "top.svg"
MODELS = ("noria-shapes", "more-shapes")
NUM_USERS = 24  # half as many again as there are slots


def draw(port, dice):
    body = {
        "prompt": "a red circle above a blue square",
        "model": dice.choice(MODELS),
        "scheduler": dice.choice(["dpm++2m", "dpm++2m", "euler-a", "ddim", "heun"]),
        "inference_steps": dice.choice([20, 30, 40]),
        "guidance_scale": dice.choice([1.0, 3.0, 7.5]),
        "priority": dice.choice(["normal", "normal", "normal", "high"]),
    } | ({"deadline_ms": 580_000} if dice.random() < 0.3 else {})
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/t2i", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with DIRECT.open(request, timeout=280) as answer:
        return answer.status


def draw_until(shown, port, dice):
    """One image after the other, so that there is something to see for as long as somebody looks; returns how they were answered."""
    answered = {draw(port, dice)}
    while not shown.is_set():
        answered.add(draw(port, dice))
    return answered


def frame_with_bars(url):
    """What `noria top --once` prints, or None while it shows nobody who is being drawn."""
    command = [sys.executable, "-m", "noria", "top", url, "--once"]
    text = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"COLUMNS": "140"}
    ).stdout
    return text if re.search(r"^ ?\d+ █+", text, re.MULTILINE) else None


@pytest.fixture
def second_model(tmp_path):
    """The bundled model under another name."""
    folder = shutil.copytree(BUNDLED, tmp_path / MODELS[1])
    described = json.loads((BUNDLED / "noria.json").read_text())
    (folder / "noria.json").write_text(json.dumps(described | {"name": MODELS[1]}))
    return folder


def test_it_shows_what_a_real_server_draws(second_model):
    dice = random.Random(2)
    command = ["bundled", "--more-models", str(second_model), "--slots", "16", "--queue-limit-s", "3600"]
    with (
        running_server(command) as server,
        concurrent.futures.ThreadPoolExecutor(NUM_USERS) as pool,
    ):
        url = f"http://127.0.0.1:{server.port}"
        shown = threading.Event()
        drawn = [pool.submit(draw_until, shown, server.port, dice) for _ in range(NUM_USERS)]
        try:
            text = until(lambda: frame_with_bars(url))
            if os.environ.get("NORIA_SCREENSHOTS"):
                PICTURE.write_text(svg_of(a_full_frame(url), 120), encoding="utf-8")
        finally:
            shown.set()
        assert set().union(*(future.result() for future in drawn)) == {200}
    assert text.startswith(f"noria {__version__} · {url} · {', '.join(MODELS)}\nengine-0 ready · cpu · ")
    assert "of 16 slots" in text
    drawing = re.findall(r"^ ?\d+ .*?█.* (\S*shapes) ", text, re.MULTILINE)
    assert drawing and set(drawing) <= {"noria-shapes", "more-shapes"}


def is_mixed(wheel):
    return len({seat.call for seat in wheel.view.seats}) > 7 and wheel.view.rates.p50_s is not None


def a_full_frame(url):
    """The wheel when it is nearly full, somebody waits, and so many have come and gone that no two are equally far."""
    board, reader, deadline = Board(), Reader(), time.monotonic() + 200
    with DIRECT.open(f"{url}/v1/live?pictures=false", timeout=60) as answer:
        while time.monotonic() < deadline:
            event = reader.line(answer.readline().decode().rstrip("\r\n"))
            if event is None:
                continue
            board.take(event, time.monotonic())
            wheel = board.wheels.get("engine-0")
            if (
                wheel
                and len(wheel.turns) > 60
                and len(wheel.view.seats) > 12
                and wheel.view.waiting
                and is_mixed(wheel)
            ):
                return frame(board, "http://127.0.0.1:8000", ("q leaves", "dim"), 120, 32, time.monotonic())
    raise AssertionError("the wheel was never full")
