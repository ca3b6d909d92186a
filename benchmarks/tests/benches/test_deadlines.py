"""The contract bench from end to end, against servers that the test plants in Noria's and the seed's places."""

import contextlib
import http.server
import importlib.util
import io
import itertools
import json
import pathlib
import threading

import psutil
import pytest
from PIL import Image

from noria.config import Config
from noria.errors import ConfigError
from noria.models.catalog import open_model
from noria_bench.benches import deadlines
from noria_bench.benches.deadline_options import DeadlineOptions
from noria_bench.measurement import batch_invariance
from noria_bench.targets.server import RunningServer

OPTIONS = DeadlineOptions(loads=(50, 150), seconds=1.0, targets=("least-slack", "seed"))


def png(value):
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (value, value, value)).save(file, "PNG")
    return file.getvalue()


class FakeTargetHandler(http.server.BaseHTTPRequestHandler):
    """Answers one grey image at once on Noria's path, and an error on the seed's; darker from the fourth on, by `shade`."""

    protocol_version = "HTTP/1.1"
    wbufsize = 65536  # one packet an answer

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        value = 100 - (self.server.shade if next(self.server.numbers) >= 3 else 0)
        failing = self.path == "/t2i/batched" and "deadline_ms" in body
        content = b"{}" if failing else png(value)
        self.send_response(500 if failing else 200)
        self.send_header("content-type", "image/png")
        self.send_header("content-length", str(len(content)))
        self.send_header("server-timing", "predicted;dur=10.0")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass


class FakeTargetServer(http.server.ThreadingHTTPServer):
    request_queue_size = 128
    shade = 0

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.numbers = itertools.count()  # of the answers; the first three are the probes alone

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/t2i"

    def handle_error(self, *_):  # a client that gave up
        pass


@pytest.fixture
def fake_server():
    with FakeTargetServer(("127.0.0.1", 0), FakeTargetHandler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture
def started_arguments(fake_server, monkeypatch):
    """The flags or the model that each server was started with."""
    started = []

    @contextlib.contextmanager
    def running(*arguments):
        started.append(arguments)
        yield RunningServer(fake_server.server_port, 0.0, psutil.Process())

    monkeypatch.setattr(deadlines, "running_server", running)
    monkeypatch.setattr(deadlines, "running_target", running)
    monkeypatch.setattr(deadlines, "_SATURATED_S", 0.4)
    monkeypatch.setattr(deadlines, "_WARM_UP_S", 0.2)
    monkeypatch.setattr(deadlines, "_STEADY_S", 0.4)
    # A planted server is so quick that a true share of its capacity would be thousands of requests.
    monkeypatch.setattr(
        deadlines.calibration, "capacity", lambda *_: deadlines.calibration.Capacity(800.0, 20.0, 16.0, 0)
    )
    monkeypatch.setattr(
        deadlines.calibration, "solo_s", lambda *_: 60.0
    )  # nobody is late because a test was kept waiting
    return started


def test_every_load_meets_every_target_with_the_same_trace(started_arguments, tmp_path, capsys):
    output = tmp_path / "contract.json"
    assert deadlines.main(Config(), OPTIONS, output, tmp_path / "plots") == 0
    document = json.loads(output.read_text())
    assert document["complete"]
    assert [(run["load"], run["target"]) for run in document["runs"]] == [
        (50, "least-slack"),
        (50, "seed"),
        (150, "least-slack"),
        (150, "seed"),
    ]
    fields = document["record_fields"]
    by_target = [
        [[row[fields.index(name)] for name in ("number", "intended_s", "deadline_s", "rows")] for row in run["records"]]
        for run in document["runs"]
    ]
    assert by_target[0] == by_target[1]
    assert by_target[2] == by_target[3]
    assert [row["attainment"] for row in document["summary"]["runs"]] == [1.0, 0.0, 1.0, 0.0]
    assert document["summary"]["largest_channel_difference"] == {"as it is": 0, "one bucket": 0}
    assert "| seed | 0.00 | 0.00 |" in capsys.readouterr().out
    assert (tmp_path / "plots" / "attainment.svg").exists()
    caches = {words[words.index("--cache-dir") + 1] for words, *more in started_arguments if not more}
    assert len(caches) == 1  # one for the bench, gone with it
    assert not pathlib.Path(caches.pop()).exists()


def test_each_run_has_a_server_of_its_own_with_its_policy_and_the_settings(started_arguments):
    config = Config(model="bundled", log_level="error")
    bench = deadlines.DeadlineBench(config, DeadlineOptions((50,), 1.0, ("fcfs", "shortest-first")), None)
    bench.measure()
    flags = [arguments[0] for arguments in started_arguments]
    assert [words[words.index("--policy") + 1] for words in flags] == [
        "least-slack",
        "least-slack",
        "fcfs",
        "shortest-first",
    ]
    assert all(words[:3] == ["bundled", "--log-level", "error"] for words in flags)
    assert flags[1][-2:] == ["--buckets", "64"]


def test_an_interrupted_bench_keeps_and_prints_what_it_has(started_arguments, monkeypatch, tmp_path, capsys):
    seeds = []

    @contextlib.contextmanager
    def interrupted(*_):
        seeds.append(1)
        if len(seeds) == 2:  # the first was its capacity
            raise KeyboardInterrupt
        with deadlines.running_server() as server:
            yield server

    monkeypatch.setattr(deadlines, "running_target", interrupted)
    output = tmp_path / "contract.json"
    assert deadlines.main(Config(), OPTIONS, output) == 130
    document = json.loads(output.read_text())
    assert not document["complete"]
    assert [(run["load"], run["target"]) for run in document["runs"]] == [(50, "least-slack")]
    assert "incomplete" in capsys.readouterr().out


def test_a_bench_that_cannot_begin_says_why(monkeypatch, capsys):
    @contextlib.contextmanager
    def ends(*_):
        raise RuntimeError("the server ended with status 3")
        yield

    monkeypatch.setattr(deadlines, "running_server", ends)
    assert deadlines.main(Config(), OPTIONS) == 1
    assert "the server ended with status 3" in capsys.readouterr().err


def test_what_is_not_installed_is_said_at_once(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "fastapi" else name)
    with pytest.raises(ConfigError, match=r"needs fastapi, which is not installed.*noria-serve\[bench\]"):
        deadlines.main(Config(), OPTIONS)


@pytest.mark.parametrize("shade", [0, 2])
def test_an_image_that_differs_in_a_crowd_is_found(fake_server, shade):
    fake_server.shade = shade
    assert batch_invariance.max_channel_differences(fake_server.url, open_model("bundled")) == [shade] * 3
