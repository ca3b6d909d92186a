"""`noria bench cluster`: its figures and report, the device that sleeps, and one real run."""

import itertools
import pathlib
import sys

import httpx
import pytest

from noria.testing.server import running_process
from noria_bench.cluster import bench, fake_device
from noria_bench.cluster.options import ClusterOptions
from noria_bench.cluster.report import write_report
from noria_bench.cluster.results import SERVINGS, ClusterResult, ClusterRun, summarize
from noria_bench.cluster.servings import ROLES, cpu_s_by_role, role_of
from noria_bench.load.closed_loop import Reply
from noria_bench.measurement.provenance import collect_provenance
from noria_bench.targets import environments


def test_an_image_counts_with_the_part_of_its_time_in_the_window():
    replies = [Reply(0.0, 2.0, 200, 9), Reply(2.0, 3.0, 200, 9), Reply(3.0, 7.0, 200, 9), Reply(9.0, 9.5, 0, 0)]
    run = summarize("ray", 1, "short", 0, replies, (1.0, 4.0), {})
    assert run.num_images == pytest.approx(0.5 + 1 + 0.25)
    assert run.images_per_s == pytest.approx(1.75 / 3)
    assert (run.p50_ms, run.num_failed) == (1500.0, 1)
    with pytest.raises(RuntimeError, match=r"no image ended in 0\.5 s"):
        summarize("ray", 1, "short", 0, replies, (5.0, 5.5), {})


@pytest.mark.parametrize(
    ("name", "command", "role"),
    [
        ("noria", "noria frontend frontend-0", "front end"),
        ("python", "ray::ServeReplica:noria:frontend", "front end"),
        ("noria", "noria engine engine-0", "engines"),
        ("python", "ray::ServeReplica:noria:engine-bundled", "engine actors"),
        ("haproxy", "/x/haproxy -db -f /tmp/a.cfg", "HAProxy"),
        ("raylet", "/x/raylet --raylet_socket_name=a", "rest of the server"),
    ],
)
def test_a_process_is_known_by_its_title(name, command, role):
    assert role_of(name, command) == role


def test_the_report_compares_pairs_and_the_share_of_linear(tmp_path):
    cpu_s = dict.fromkeys(ROLES, 0.1) | {"front end": 0.3, "bench": 0.5, "others": 1.0}
    runs = [
        ClusterRun(serving, 2, "short", number, 10.0, images, 50.0, 90.0, 0, cpu_s)
        for number in range(2)
        for serving, images in (("plain", 100.0), ("ray", 99.0 - 8 * number))
    ]
    runs += [
        ClusterRun(serving, engines, "long", 1, 10.0, 40.0 * engines, 50.0, 90.0, 0, cpu_s)
        for serving, engines in itertools.product(SERVINGS, (1, 2))
    ]
    runs.append(ClusterRun("ray", 4, "long", 1, 10.0, 144.0, 50.0, 90.0, 0, cpu_s))
    options = {"step_ms": 20.0, "long_step_ms": 100.0, "slots": 4, "users_per_engine": 8}
    ideal = {"short": 20.0, "long": 4.0}
    result = ClusterResult(collect_provenance(), {"ray": "2.60.0"}, options, ideal, runs=runs, complete=True)
    report, plot = write_report(result, tmp_path)
    text = report.read_text(encoding="utf-8")
    assert "| 2 | 10.0 | 9.5 | 0.95 × | 0.91 to 0.99 | 50 | 50 | 90 | 90 |" in text
    assert "| 2 | 8.0 | 100.0 % | 50 | 90 | 8.0 | 100.0 % | 50 | 90 |" in text
    assert "| 4 | – | – | – | – | 14.4 | 90.0 % | 50 | 90 |" in text
    assert "| noria serve, 2 engines, short steps | 3.00 | 1.00 |" in text
    assert "up to 0.10 cores" in text and "Interrupted" not in text and b"<svg" in plot.read_bytes()


# Starts a server with an engine: some seconds.
def test_a_server_has_the_device_that_sleeps(tmp_path):
    variables = fake_device.install_at(tmp_path, {128: 30.0})
    command = ["env", *(f"{name}={value}" for name, value in variables.items()), sys.executable, "-m", "noria", "serve"]
    command += ["--data-dir", str(tmp_path / "data"), "--slots", "4", "--log-level", "warning"]
    with running_process(lambda port: [*command, "--port", str(port)]) as server:
        answer = httpx.post(
            f"http://127.0.0.1:{server.port}/t2i",
            json={"prompt": "a circle", "seed": 3, "inference_steps": 10, "width": 128, "height": 160},
            trust_env=False,
        )
        roles = cpu_s_by_role(server)
    assert answer.status_code == 200 and answer.headers["content-type"] == "image/png"
    assert answer.elapsed.total_seconds() > 0.3
    assert roles["front end"] > 0 and roles["engines"] > 0


# Starts Ray and two servers twice.
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_both_servers_are_measured_with_short_and_long_steps(tmp_path):
    environments.install("ray", print)
    options = ClusterOptions((1,), (1, 2), long_step_ms=40.0, seconds=2.0, num_rounds=1)
    measured = bench.ClusterBench(options, pathlib.Path(tmp_path), tmp_path)
    measured.measure()
    assert [(run.serving, run.num_engines, run.steps) for run in measured.runs] == [
        ("plain", 1, "short"),
        ("ray", 1, "short"),
        ("plain", 1, "long"),
        ("ray", 1, "long"),
        ("ray", 2, "long"),
        ("plain", 2, "long"),
    ]
    for run in measured.runs:
        assert not run.num_failed and 0 < run.images_per_s < 1.2 * run.num_engines * measured.result().ideal[run.steps]
        assert run.cpu_s["front end"] > 0 and run.cpu_s["engines"] > 0
        assert (run.cpu_s["HAProxy"] > 0) == (run.serving == "ray")
