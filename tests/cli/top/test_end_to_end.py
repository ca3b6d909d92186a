"""`noria top` with a real server under load.

With NORIA_SCREENSHOTS set it also writes the picture of the documentation.
"""

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
from svg_export import svg_of

from noria import __version__
from noria.cli.top.events import LiveEventParser
from noria.cli.top.frame import render_frame
from noria.cli.top.server_state import ServerState
from noria.models.location import BUNDLED
from noria.testing.server import NO_PROXY_OPENER, running_server
from waiting import wait_until

pytestmark = pytest.mark.slow  # a server with two models under load; tests/cli/top holds the parts

PICTURE = pathlib.Path(__file__).parents[3] / "docs" / "images" / "top.svg"
MODELS = ("noria-shapes", "more-shapes")
NUM_USERS = 24  # 1.5 times the slots


def generate(port, rng):
    body = {
        "prompt": "a red circle above a blue square",
        "model": rng.choice(MODELS),
        "scheduler": rng.choice(["dpm++2m", "dpm++2m", "euler-a", "ddim", "heun"]),
        "inference_steps": rng.choice([20, 30, 40]),
        "guidance_scale": rng.choice([1.0, 3.0, 7.5]),
        "priority": rng.choice(["normal", "normal", "normal", "high"]),
    } | ({"deadline_ms": 580_000} if rng.random() < 0.3 else {})
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/t2i", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with NO_PROXY_OPENER.open(request, timeout=280) as answer:
        return answer.status


def generate_until(stop, port, rng):
    """Send one request after the other until `stop`; returns the set of status codes."""
    statuses = {generate(port, rng)}
    while not stop.is_set():
        statuses.add(generate(port, rng))
    return statuses


def frame_with_bars(url):
    """The output of `noria top --once`, or None if it shows no running image."""
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


def test_it_shows_what_a_real_server_generates(second_model):
    rng = random.Random(2)
    command = ["bundled", "--additional-models", str(second_model), "--slots", "16", "--queue-limit-s", "3600"]
    with running_server(command) as server, concurrent.futures.ThreadPoolExecutor(NUM_USERS) as pool:
        url = f"http://127.0.0.1:{server.port}"
        stop = threading.Event()
        clients = [pool.submit(generate_until, stop, server.port, rng) for _ in range(NUM_USERS)]
        try:
            text = wait_until(lambda: frame_with_bars(url))
            if os.environ.get("NORIA_SCREENSHOTS"):
                PICTURE.write_text(svg_of(a_full_frame(url), 120), encoding="utf-8")
        finally:
            stop.set()
        assert set().union(*(future.result() for future in clients)) == {200}
    assert text.startswith(f"noria {__version__} · {url} · {', '.join(MODELS)}\nengine-0 ready · cpu · ")
    assert "of 16 slots" in text
    running_models = re.findall(r"^ ?\d+ .*?█.* (\S*shapes) ", text, re.MULTILINE)
    assert running_models and set(running_models) <= {"noria-shapes", "more-shapes"}


def is_mixed(history):
    return len({image.call for image in history.view.slots}) > 7 and history.view.rates.p50_s is not None


def a_full_frame(url):
    """A frame with nearly all slots used, waiting requests, and images at many different steps."""
    state, parser, deadline = ServerState(), LiveEventParser(), time.monotonic() + 200
    with NO_PROXY_OPENER.open(f"{url}/v1/live?thumbnails=false", timeout=60) as answer:
        while time.monotonic() < deadline:
            event = parser.feed_line(answer.readline().decode().rstrip("\r\n"))
            if event is None:
                continue
            state.apply(event, time.monotonic())
            history = state.histories.get("engine-0")
            if (
                history
                and len(history.iterations) > 60
                and len(history.view.slots) > 12
                and history.view.waiting
                and is_mixed(history)
            ):
                return render_frame(state, "http://127.0.0.1:8000", ("q quits", "dim"), 120, 32, time.monotonic())
    raise AssertionError("the batch was never full")
