"""Runs from end to end with real clients, against servers that answer correctly, wrongly or not at all."""

import contextlib
import functools
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading

import image_server
import msgspec
import psutil
import pytest

from noria.cli.main import main
from noria.config import Config, EngineConfig
from noria.errors import ConfigError
from noria.models.catalog import open_model
from noria_bench.benches import run_plans, suite
from noria_bench.benches.suite_options import SuiteOptions
from noria_bench.load import load_generators
from noria_bench.measurement import runs
from noria_bench.reports import writer
from noria_bench.simulator.calibration import calibrate as calibration_of
from noria_bench.targets.catalog import read_targets
from waiting import wait_until

SCENARIO_2 = functools.partial(run_plans.scenario_runs, "scenario2")
CONFIG = Config(engine=EngineConfig(devices=("cpu",)))


class Solo:
    def __init__(self, spec, config):
        self.generate = lambda body: [image_server.pixels(body)]


@pytest.fixture
def run_suite(monkeypatch, tmp_path):
    """A function that measures servers with the given behaviour, by target; returns the status and the runs.

    Runs scenario 2 unless `plan` is given. In a run of 6 s the last user arrives after 2.3 s. On a busy machine a run
    may be too short: then all is repeated for longer, until `enough(found)`.
    """

    behaviours = {}

    def running_target(target, spec, config, settings=None):
        return image_server.running(behaviours[target.name])

    monkeypatch.setattr(suite, "running_target", running_target)
    monkeypatch.setattr(suite, "SoloGenerator", Solo)

    def measure(seconds=1.0, plan=SCENARIO_2, options=None, enough=None, **behaviour):
        behaviours.update({name.replace("_", "-"): each for name, each in behaviour.items()})
        for length in (seconds, 20.0, 60.0):
            chosen = SuiteOptions(read_targets(",".join(behaviours)), length, **options or {})
            status = suite.main(
                CONFIG, tmp_path / "out", lambda *given, to=chosen: plan(to, *given), writer.write_report
            )
            found = {run.target: run for run in runs.read_runs(tmp_path / "out")}
            if enough is None or enough(found):
                break
        return status, found

    return measure


def test_a_correct_server_has_requests_of_every_user_and_no_failure(run_suite, capsys):
    status, found = run_suite(seconds=6.0, noria="fine", enough=lambda made: _max_in_flight(made["noria"]) == 8)
    run = found["noria"]
    assert status == 0
    assert run.complete
    assert all((record.status, record.batch_size, record.queue_s) == (200, 3, 0.005) for record in run.records)
    assert all(record.predicted_s == 0.08 and record.latency_s >= 0.05 for record in run.records)
    assert len({record.number for record in run.records}) == len(run.records)
    assert len(run.image_checks) >= 4
    assert not any(check.problem for check in run.image_checks)
    assert len(run.usage.at_s) == len(run.usage.cpu_cores) == len(run.usage.resident_bytes) > 0
    printed = capsys.readouterr()
    assert "| noria" in printed.out
    assert "warming up" in printed.err
    # A user arrives every third of a second.
    assert _max_in_flight(run, until_s=0.3) == 1 and _max_in_flight(run, until_s=1.0) <= 4


def _max_in_flight(run, until_s=math.inf):
    """The most requests that were in flight at once, of those sent before `until_s`."""
    sent = [record for record in run.records if record.sent_s < until_s]
    return max(sum(other.sent_s <= record.sent_s < other.done_s for other in sent) for record in sent)


def test_an_open_loop_of_noria_has_what_a_simulation_needs(run_suite, tmp_path):
    _, found = run_suite(
        plan=run_plans.mixed_runs,
        options={"rows_per_s": 300.0},
        enough=lambda made: made["noria"].records,
        noria="fine",
    )
    run = found["noria"]
    assert (run.engine_costs["slots"], run.engine_costs["max_rows"], run.engine_costs["slowdown"]) == (16, 32, 2.0)
    assert all(record.engine_s == pytest.approx(0.04) for record in run.records)
    (calibration,) = calibration_of(tmp_path / "out")
    assert calibration.simulated.num_requests == len(run.records)
    assert calibration.measured.quantile_s(0.5) > 0.05
    assert calibration.device.front_end_s == pytest.approx(0.01, abs=0.05)


@pytest.mark.parametrize(("behaviour", "words"), [("another", "is another image"), ("truncated", "cannot be decoded")])
def test_a_server_with_wrong_images_is_found(run_suite, behaviour, words, capsys):
    status, found = run_suite(
        reference_batched=behaviour, enough=lambda made: len(made["reference-batched"].records) >= 8
    )
    run = found["reference-batched"]
    assert status == 0
    assert len(run.image_checks) >= 4
    assert all(words in check.problem for check in run.image_checks)
    assert words in capsys.readouterr().err


def test_a_server_that_answers_only_errors_costs_its_warm_up_alone(run_suite, capsys):
    status, found = run_suite(reference_batched="broken")
    assert (status, found) == (1, {})
    assert "every request of the warm-up failed: 500 b'{}'" in capsys.readouterr().err


def test_an_incomplete_answer_is_a_failure(run_suite, monkeypatch):
    monkeypatch.setattr(suite, "warm_up", lambda *_: None)
    _, found = run_suite(reference_batched="cut", enough=lambda made: made["reference-batched"].records)
    run = found["reference-batched"]
    assert {record.status for record in run.records} == {0}
    assert run.image_checks == ()


def test_a_server_that_ends_is_reported_and_the_next_one_is_measured(run_suite, monkeypatch, capsys):
    monkeypatch.setattr(suite, "warm_up", lambda *_: None)
    status, found = run_suite(noria="dying", reference_batched="fine", enough=lambda made: not made["noria"].complete)
    assert status == 1
    assert not found["noria"].complete
    assert 0 < sum(record.status == 200 for record in found["noria"].records) <= 10
    assert found["reference-batched"].complete
    assert "scenario2 noria failed: the server ended under load" in capsys.readouterr().err


def test_a_quick_suite_starts_the_server_of_several_targets_once(monkeypatch, tmp_path):
    started, ended = [], []

    @contextlib.contextmanager
    def running_target(target, spec, config, settings=None):
        started.append(target.name)
        with image_server.running("dying" if target.name == "litserve" else "fine") as server:
            yield server
        ended.append(target.name)

    monkeypatch.setattr(suite, "running_target", running_target)
    monkeypatch.setattr(suite, "SoloGenerator", Solo)
    options = SuiteOptions(read_targets("noria,reference-response-sync,reference-batched,litserve"), 2.0, quick=True)
    status = suite.main(CONFIG, tmp_path, functools.partial(SCENARIO_2, options), lambda *_: [], quick=True)
    found = runs.read_runs(tmp_path)
    assert started == ["noria", "reference-response-sync", "litserve"]
    assert ended == started
    assert (status, [run.complete for run in found]) == (1, [True, True, True, False])
    assert all(1 <= len(run.image_checks) <= 4 for run in found if run.complete)


def test_a_server_that_does_not_start_is_reported_and_the_next_one_is_measured(run_suite, monkeypatch, capsys):
    started = suite.running_target

    @contextlib.contextmanager
    def ends(target, *rest):
        if target.name == "noria":
            raise RuntimeError("the server ended with status 3")
        with started(target, *rest) as server:
            yield server

    monkeypatch.setattr(suite, "running_target", ends)
    status, found = run_suite(noria="fine", reference_batched="fine")
    assert (status, list(found)) == (1, ["reference-batched"])
    assert "scenario2 noria failed: the server ended with status 3" in capsys.readouterr().err


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_keeps_the_records_of_the_run_and_leaves_nothing_else(run_suite, sent, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = set(psutil.Process().children())

    def interrupt():
        records = "noria-bench-*/records.jsonl"
        wait_until(lambda: any(file.stat().st_size > 2000 for file in tmp_path.glob(records)))
        os.kill(os.getpid(), sent)

    threading.Thread(target=interrupt, daemon=True).start()
    status, found = run_suite(seconds=120.0, noria="fine", reference_batched="fine")
    assert status == 130
    assert list(found) == ["noria"]
    assert not found["noria"].complete
    assert len(found["noria"].records) > 10
    assert (tmp_path / "out" / "report.html").exists()
    assert not list(tmp_path.glob("noria-bench-*"))
    assert set(psutil.Process().children()) <= before
    assert "incomplete" in capsys.readouterr().err


BENCH_SCRIPT = """
import pathlib, sys
import psutil
from noria_bench.benches import run_plans
from noria_bench.load import load_generators
from noria.models.catalog import open_model

load = run_plans.scenario_load_generator("scenario2", 300.0, 1, open_model("bundled"))
if sys.argv[1] == "open":
    load = run_plans.open_load_generator("poisson", 400.0, 300.0, 1, open_model("bundled"))
load_generators.run_load(load, sys.argv[2], "t2i", pathlib.Path(sys.argv[3]), psutil.Process(int(sys.argv[4])), print)
"""


@pytest.mark.parametrize("kind", ["scenario", "open"])
def test_a_client_ends_with_a_bench_that_is_killed(kind, tmp_path):
    with image_server.running("fine") as server:
        url, pid = f"http://127.0.0.1:{server.port}", str(server.process.pid)
        with subprocess.Popen([sys.executable, "-c", BENCH_SCRIPT, kind, url, str(tmp_path), pid]) as bench:
            records = tmp_path / "records.jsonl"
            wait_until(lambda: bench.poll() is not None or (records.exists() and records.stat().st_size), 120)
            (client,) = psutil.Process(bench.pid).children()
            bench.kill()
        wait_until(lambda: load_generators.has_ended(client))


class EndedClientLoadGenerator(load_generators.LoadGenerator):
    """Its client has ended before it is polled."""

    def start(self, url, protocol, folder):
        client = super().start(url, protocol, folder)
        client.wait()
        return client


def test_a_server_that_ends_just_before_its_client_has_failed(tmp_path):
    load = run_plans.open_load_generator("poisson", 400.0, 0.1, 1, open_model("bundled"))
    with subprocess.Popen(["true"]) as server:
        watched = psutil.Process(server.pid)
        wait_until(lambda: load_generators.has_ended(watched))
        with pytest.raises(RuntimeError, match="the server ended under load"):
            load_generators.run_load(
                EndedClientLoadGenerator(load.traffic, load.arrivals, [], 0.1),
                "http://127.0.0.1:1",
                "t2i",
                tmp_path,
                watched,
                print,
            )


def test_a_folder_that_cannot_be_created_is_rejected_before_any_measurement(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--out .*file/out cannot be written"):
        suite.main(CONFIG, tmp_path / "file" / "out", lambda *_: pytest.fail("measured"), writer.write_report)


# diffusers' own schedulers in the bench's process, with the newest NumPy
@pytest.mark.slow  # starts the servers of two benches
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
@pytest.mark.parametrize("bench", ["scenario2", "mixed"])
def test_real_servers_give_the_images_of_the_pipeline(bench, tiny_folder, tmp_path, capsys):
    out, rate = tmp_path / "out", ["--rows-per-s", "60"] if bench == "mixed" else []
    words = [
        "bench",
        bench,
        str(tiny_folder),
        "--duration",
        "3",
        "--out",
        str(out),
        "--threads",
        "1",
        "--devices",
        "cpu",
    ]
    assert main([*words, *rate]) == 0, capsys.readouterr().err
    found = {run.target: run for run in runs.read_runs(out)}
    assert list(found) == ["noria", "reference-batched"]
    for run in found.values():
        assert run.complete
        assert run.records
        assert not [check for check in run.image_checks if check.problem]
    assert (out / "report.html").exists()
    assert msgspec.json.decode((out / f"{bench}-noria{'-poisson' if bench == 'mixed' else ''}.json").read_bytes())
