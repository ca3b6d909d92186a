"""`noria bench cost`: its arithmetic, viewers, servers without metrics, and the whole bench against fake servers."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
import urllib.request

import psutil
import pytest

from http_servers import HttpServer
from noria.config import Config
from noria.frontend.http.body import decode
from noria.protocol.request import ImageRequestBody
from noria.testing.server import NO_PROXY_OPENER, RunningServer, running_process
from noria_bench.cost import background_viewers, bench, summary
from noria_bench.cost.options import CostOptions
from noria_bench.cost.summary import CostRun, Pair
from waiting import wait_until


def cost_run(seconds=10.0, cpu_s=10.0, rows=1000.0, **changes):
    return CostRun(
        **({"seconds": seconds, "cpu_s": cpu_s, "rows": rows, "images": 25, "other_cpu_share": 0.0} | changes)
    )


def make_pairs(*incarnations):
    """Pairs with these ratios, by incarnation."""
    return [
        Pair(incarnation, bool(k % 2), cost_run(rows=1000.0 * ratio), cost_run())
        for incarnation, ratios in enumerate(incarnations)
        for k, ratio in enumerate(ratios)
    ]


def test_a_ratio_is_with_over_without():
    pair = Pair(0, False, cost_run(20.0, cpu_s=11.0, rows=970.0), cost_run(10.0, cpu_s=10.0, rows=1000.0))
    assert summary.throughput_ratio(pair) == 0.485
    assert summary.cpu_ratio(pair) == pytest.approx(97 / 110)


def test_the_midmean_is_geometric_and_omits_both_outer_quarters():
    assert summary.geometric_midmean([0.5, 2.0]) == pytest.approx(1.0)
    assert summary.geometric_midmean([0.01, 0.99, 1.0, 50.0]) == pytest.approx(0.99499, abs=1e-5)
    assert summary.geometric_midmean([0.9]) == pytest.approx(0.9)


def test_the_interval_is_reproducible_and_as_wide_as_incarnations_differ():
    one_noise = [0.9, 1.1, 0.95, 1.05]
    uniform = summary.bootstrap_interval(make_pairs(*[one_noise] * 8), summary.throughput_ratio)
    assert uniform == summary.bootstrap_interval(make_pairs(*[one_noise] * 8), summary.throughput_ratio)
    assert uniform.low == pytest.approx(uniform.mean) and uniform.high == pytest.approx(uniform.mean)
    different = summary.bootstrap_interval(
        make_pairs(*[[0.9, 0.91, 0.89, 0.9]] * 4, *[[1.1, 1.11, 1.09, 1.1]] * 4), summary.throughput_ratio
    )
    assert different.low < 0.93 < different.mean < 1.07 < different.high


@pytest.mark.parametrize(
    ("ratios", "verdict"),
    [
        ((0.995, 1.0, 0.99, 1.0, 0.985, 0.999), "met"),
        ((0.9, 0.91, 0.92, 0.9, 0.93, 0.91), "missed"),
        ((0.9, 1.1, 0.99, 1.0, 0.8, 1.05), "met, within the noise"),
        ((0.9, 1.1, 0.97, 0.96, 0.8, 1.05), "missed, within the noise"),
    ],
)
def test_the_verdict_says_whether_the_interval_contains_the_goal(ratios, verdict):
    assert summary.summarise(make_pairs(*([ratio] for ratio in ratios)))["verdict"] == verdict


def test_too_few_restarts_are_noted_and_without_a_pair_there_is_no_summary():
    assert summary.summarise(make_pairs([1.0] * 8))["verdict"] == "met, with too few restarts of the servers"
    assert summary.summarise([]) == {}


@contextlib.contextmanager
def fake_noria(delay_s, live=True):
    """Answers after `delay_s` without an image; has a live view and metrics."""
    ended = threading.Event()

    def answer(request):
        if request.command == "POST":
            decode(request.body, ImageRequestBody)  # raises, so that the connection breaks
            time.sleep(delay_s)
            request.send(b"image")
        elif request.path == "/metrics":
            request.send(b"noria_iterations_total 1\n")
        elif not live:
            request.send(b"{}", 404)
        else:
            request.send_response(200)
            request.send_header("content-type", "text/event-stream")
            request.end_headers()
            first, second = b'view\ndata: {"engine": "engine-0"}\n\n', b"event: engine_view\ndata: {}\n\n"
            for piece in (b"event: engine_", first, second):
                request.wfile.write(piece)
                request.wfile.flush()
            ended.wait(60)
            request.close_connection = True

    with HttpServer(answer) as server:
        yield server
        ended.set()


def test_background_viewers_read_views_and_scrape():
    with (
        fake_noria(0.0) as server,
        background_viewers.background_viewers(server.server_port, live=True, scrapes=True) as stats,
    ):
        wait_until(lambda: stats.num_views >= 2 and stats.scrapes_s)
    assert (stats.num_views, len(stats.scrapes_s), stats.fault) == (2, 1, "")


def test_a_background_viewer_that_is_rejected_reports_it():
    with (
        fake_noria(0.0, live=False) as server,
        background_viewers.background_viewers(server.server_port, live=True, scrapes=False) as stats,
    ):
        wait_until(lambda: stats.fault)
    assert stats.fault == "GET /v1/live returned 404"


@pytest.fixture
def run_bench(monkeypatch, tmp_path):
    """The bench against fake servers; returns its status, document and commands."""

    def measure(options, instrumented_s, bare_s, *, live=True, interrupt=None):
        commands = []

        @contextlib.contextmanager
        def running(command, **_):
            commands.append(command(1))
            if interrupt is not None and len(commands) == interrupt:
                raise KeyboardInterrupt
            bare = "error" in commands[-1] and "info" not in commands[-1]
            with fake_noria(bare_s if bare else instrumented_s, live) as server:
                yield RunningServer(server.server_port, 0.0, psutil.Process())

        monkeypatch.setattr(bench, "running_process", running)
        monkeypatch.setattr(bench, "_WARM_UP_S", 0.1)
        monkeypatch.setattr(bench, "_PAIRS_PER_INCARNATION", 2)
        for module in (bench, background_viewers):  # 15 s may pass on a busy machine
            monkeypatch.setattr(module, "SCRAPE_INTERVAL_S", 600.0)
        monkeypatch.setattr(
            bench,
            "measure_scrapes",
            lambda *_: {"description": "1", "bytes": 1, "best_s": 0.001, "median_s": 0.03, "worst_s": 1},
        )
        output = tmp_path / "cost.json"
        status = bench.main(Config(), options, output)
        return status, json.loads(output.read_text()), commands

    return measure


SHORT_OPTIONS = CostOptions(num_pairs=3, num_requests=6, num_users=2)


def test_servers_alternate_and_are_restarted(run_bench, capsys):
    status, document, commands = run_bench(SHORT_OPTIONS, 0.01, 0.01)
    assert status == 0
    assert document["complete"]
    assert [pair["bare_first"] for pair in document["pairs"]] == [False, True, False]
    assert len(commands) == 4
    assert ["noria_bench.cost.no_metrics_server" in words for words in commands] == [False, True, True, False]
    assert [pair["incarnation"] for pair in document["pairs"]] == [0, 0, 1]
    assert all(pair["instrumented"]["views"] >= 1 and pair["bare"]["views"] == 0 for pair in document["pairs"])
    assert all(
        pair[side]["images"] == pair["bare"]["images"] >= 6
        for pair in document["pairs"]
        for side in pair
        if side in ("instrumented", "bare")
    )
    assert [len(pair["instrumented"]["scrapes_s"]) for pair in document["pairs"]] == [1, 0, 0]  # 10 min have not passed
    out = capsys.readouterr().out
    assert "Pairs: 3; starts of both servers: 2. Goal, at least 0.98" in out
    assert "| 1, 0 kB | 1.0 | 30.0 | 1000.0 | missed |" in out


def test_a_slower_instrumented_server_misses_the_goal(run_bench):
    # So much slower that no disturbance of the bare server is as large.
    _, document, _ = run_bench(CostOptions(num_pairs=2, num_requests=12, num_users=2), 0.3, 0.0)
    assert document["summary"]["throughput_ratio"]["mean"] < 0.8
    assert document["summary"]["verdict"].startswith("missed")


def test_a_single_feature_leaves_the_others_off(run_bench):
    _, document, commands = run_bench(
        CostOptions(num_pairs=1, num_requests=6, num_users=2, features=("logs",)), 0.01, 0.01
    )
    instrumented, bare = commands
    assert (
        "noria_bench.cost.no_metrics_server" in instrumented
        and instrumented[instrumented.index("json") - 1] == "--log-format"
    )
    assert "noria_bench.cost.no_metrics_server" in bare and "info" not in bare
    assert document["pairs"][0]["instrumented"]["views"] == 0
    assert document["pairs"][0]["instrumented"]["scrapes_s"] == []


def test_a_live_page_without_views_stops_the_bench(run_bench, capsys, tmp_path):
    with pytest.raises(FileNotFoundError):
        run_bench(SHORT_OPTIONS, 0.01, 0.01, live=False)
    assert "GET /v1/live returned 404" in capsys.readouterr().err


def test_an_interrupted_bench_saves_and_prints_what_it_has(run_bench, capsys):
    status, document, _ = run_bench(SHORT_OPTIONS, 0.01, 0.01, interrupt=3)
    assert status == 130
    assert not document["complete"]
    assert len(document["pairs"]) == 2
    assert "incomplete" in capsys.readouterr().out


def test_synthetic_processes_have_full_metrics_and_those_of_dead_processes():
    found = bench.measure_scrapes(2, 1, num_scrapes=2)
    assert found["description"] == "2 front ends and 1 engine"
    assert found["bytes"] > 100_000
    assert found["best_s"] <= found["median_s"] <= found["worst_s"]
    alone, after = (bench.measure_scrapes(1, 1, num_restarts=num, num_scrapes=1) for num in (0, 9))
    assert after["description"] == "1 front end and 1 engine, after 9 restarts"
    assert after["bytes"] > alone["bytes"]  # the same lines, with a digit more


def test_a_process_with_disabled_metrics_counts_nothing():
    script = (
        "from noria_bench.cost.no_metrics_server import disable_metrics; disable_metrics()\n"
        "from noria.observe.metrics import declarations as metrics\n"
        "from noria.observe.metrics.exposition import exposition, keep_exemplar, series\n"
        "from noria.observe.metrics.section import add_all\n"
        "metrics.ITERATIONS.labels('engine-0').inc(); metrics.REQUESTS.labels('m', 'ok').inc()\n"
        "metrics.REQUESTS_IN_FLIGHT.set(8); metrics.REQUESTS_IN_FLIGHT.dec()\n"
        "metrics.ITERATION_SECONDS.labels('8x8').observe(1)\n"
        "add_all((series(metrics.REQUEST_SECONDS, 'm'), 1.0), (metrics.REQUESTS_IN_FLIGHT, 1))\n"
        "keep_exemplar({}, (metrics.REQUEST_SECONDS, 1.0, ('m',)))\n"
        "with metrics.REQUESTS_IN_FLIGHT.track_inprogress(): pass\n"
        "print(exposition()[0].decode())"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PROMETHEUS_MULTIPROC_DIR"}
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=environment)
    assert "noria_iterations_total{" not in run.stdout
    assert "noria_requests_in_flight 0.0" in run.stdout
    assert 'outcome="ok"' not in run.stdout
    assert "8x8" not in run.stdout


@pytest.mark.slow  # starts a server, which generates images
def test_a_server_without_metrics_serves_and_counts_nothing(tmp_path):
    def command(port):
        flags = ["bundled", "--slots", "2", "--data-dir", str(tmp_path), "--log-level", "error", "--port", str(port)]
        return [sys.executable, "-m", "noria_bench.cost.no_metrics_server", *flags]

    with running_process(command, log=tmp_path / "log") as server:
        body = json.dumps({"prompt": "a red circle", "inference_steps": 2}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{server.port}/t2i", body, {"content-type": "application/json"}
        )
        with NO_PROXY_OPENER.open(request, timeout=200) as answer:
            assert answer.read().startswith(b"\x89PNG")
        with NO_PROXY_OPENER.open(f"http://127.0.0.1:{server.port}/metrics", timeout=60) as answer:
            metrics = answer.read().decode()
        assert len(server.children("engine")) == len(server.children("frontend")) == 1
    assert 'process="engine-0"' in metrics  # read at the scrape, not counted
    counted = [line for line in metrics.splitlines() if not line.startswith(("#", "noria_process", "noria_machine"))]
    assert all(line.endswith(" 0.0") for line in counted if line.startswith("noria_")), counted
    assert not any(line.startswith("noria_images_total") for line in counted)
    assert (tmp_path / "log").read_text() == ""
