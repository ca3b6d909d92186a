"""The deadlines bench from end to end, against fake servers in place of Noria and the reference server."""

import contextlib
import io
import itertools

import numpy as np
import psutil
import pytest
from PIL import Image

from http_servers import HttpServer
from noria.config import Config, EngineConfig
from noria.models.catalog import open_model
from noria.testing.server import RunningServer
from noria_bench.benches import deadlines, suite
from noria_bench.benches.deadline_options import DeadlineOptions
from noria_bench.measurement import batch_invariance
from noria_bench.measurement.run_metrics import attainment
from noria_bench.measurement.runs import read_runs

OPTIONS = DeadlineOptions(loads=(50, 150), seconds=1.0, targets=("least-slack", "reference"))
CONFIG = Config(log_level="error", engine=EngineConfig(devices=("cpu",)))
GREY = 100


def png(value):
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (value, value, value)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def fake_server():
    """Answers one grey image on Noria's path, and an error on the reference server's; from the fourth on darker."""
    numbers = itertools.count()  # numbers of the answers; the first three are the probes alone

    def answer(request):
        value = GREY - (server.shade if next(numbers) >= 3 else 0)
        failing = request.path == "/t2i/batched" and "deadline_ms" in request.json
        headers = {"content-type": "image/png", "server-timing": "predicted;dur=10.0"}
        request.send(b"{}" if failing else png(value), 500 if failing else 200, headers)

    with HttpServer(answer) as server:
        server.shade = 0
        yield server


@pytest.fixture
def started(fake_server, monkeypatch):
    """The target and the engine settings of each server that was started."""
    started = []

    @contextlib.contextmanager
    def running(target, _spec, config, *_):
        started.append((target.name, config.engine))
        yield RunningServer(fake_server.server_port, 0.0, psutil.Process())

    class Solo:
        def __init__(self, spec, config):
            self.generate = lambda body: [np.full((8, 8, 3), GREY, np.uint8)] * body.get("n", 1)

    monkeypatch.setattr(deadlines, "running_target", running)
    monkeypatch.setattr(suite, "running_target", running)
    monkeypatch.setattr(suite, "SoloGenerator", Solo)
    monkeypatch.setattr(deadlines, "_CAPACITY_S", 0.4)
    monkeypatch.setattr(deadlines, "_STEADY_S", 0.4)
    monkeypatch.setattr(deadlines, "_NUM_WARM_UP_REQUESTS", 4)
    # A fake server is so fast that a real share of its capacity would be thousands of requests.
    capacity = deadlines.capacity.Capacity(800.0, 20.0, 16.0, 0)
    monkeypatch.setattr(deadlines.capacity, "measure_capacity", lambda *_: capacity)
    # No request is late because the machine is busy.
    monkeypatch.setattr(deadlines.capacity, "solo_s", lambda *_: 60.0)
    return started


def run_bench(options, folder):
    return deadlines.main(CONFIG, options, folder)


def test_every_load_is_sent_to_every_target_with_the_same_trace(started, tmp_path, capsys):
    assert run_bench(OPTIONS, tmp_path) == 0
    runs = read_runs(tmp_path)
    assert all(run.complete for run in runs)
    assert [(run.traffic.load_percent, run.target, run.settings["policy"]) for run in runs] == [
        (50, "noria", "least-slack"),
        (50, "reference-batched", "fair"),
        (150, "noria", "least-slack"),
        (150, "reference-batched", "fair"),
    ]
    sent = [
        sorted((record.number, record.intended_s, record.deadline_s, record.rows) for record in run.records)
        for run in runs
    ]
    assert sent[0] == sent[1] != sent[2]
    assert sent[2] == sent[3]
    assert [attainment(run.records) for run in runs] == [1.0, 0.0, 1.0, 0.0]
    assert runs[0].calibration["max_channel_differences"] == {"default": [0, 0, 0], "single_bucket": [0, 0, 0]}
    assert set(runs[0].calibration["capacity"]) == {"noria", "reference"}
    printed = capsys.readouterr().out
    assert "| reference-batched | 0.00 | 0.00 |" in printed
    assert "1.00 within their deadlines" not in printed
    assert (tmp_path / "plots" / "deadlines-load.svg").exists()


def test_each_run_has_a_server_of_its_own_with_its_policy_and_the_settings(started, tmp_path):
    assert run_bench(DeadlineOptions((50,), 1.0, ("fcfs", "shortest-first")), tmp_path) == 0
    assert [(name, engine.policy) for name, engine in started] == [
        ("noria", "least-slack"),
        ("noria", "least-slack"),
        ("noria", "fcfs"),
        ("noria", "shortest-first"),
    ]
    assert all(engine.devices == ("cpu",) for _, engine in started)
    assert started[1][1].buckets == (64,)
    assert {file.name for file in tmp_path.glob("*.json")} == {
        "deadlines-noria-50-fcfs.json",
        "deadlines-noria-50-shortest-first.json",
    }


def test_an_interrupted_bench_reports_what_it_has(started, monkeypatch, tmp_path, capsys):
    running = suite.running_target

    def interrupted(target, *rest):
        if target.name != "noria":
            raise KeyboardInterrupt
        return running(target, *rest)

    monkeypatch.setattr(suite, "running_target", interrupted)
    assert run_bench(OPTIONS, tmp_path) == 130
    assert [(run.traffic.load_percent, run.target) for run in read_runs(tmp_path)] == [(50, "noria")]
    assert "interrupted" in capsys.readouterr().err


def test_a_bench_that_cannot_start_says_why(monkeypatch, tmp_path, capsys):
    @contextlib.contextmanager
    def ends(*_):
        raise RuntimeError("the server ended with status 3")
        yield

    monkeypatch.setattr(deadlines, "running_target", ends)
    assert run_bench(OPTIONS, tmp_path) == 1
    assert "the server ended with status 3" in capsys.readouterr().err


@pytest.mark.parametrize("shade", [0, 2])
def test_an_image_that_differs_in_a_batch_is_found(fake_server, shade):
    fake_server.shade = shade
    assert batch_invariance.max_channel_differences(fake_server.url, open_model("bundled")) == [shade] * 3
