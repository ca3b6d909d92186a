"""The command: its output, and bad flags."""

import json

import msgspec
import pytest

from noria.cli.main import run
from noria.cli.parser import Parser
from noria.errors import ConfigError
from noria_bench.measurement.run_metrics import RequestRecord
from noria_bench.measurement.runs import BenchRun, ResourceUsage, Traffic, write_run
from noria_bench.simulator.command import add_to
from noria_bench.simulator.devices import EXAMPLE
from noria_bench.simulator.workload import SimulateError


def simulate(*flags):
    parser = Parser(prog="noria")
    add_to(parser.add_subparsers(required=True))
    arguments = parser.parse_args(["simulate", *map(str, flags)])
    return arguments.run(arguments)


def test_policies_and_slots_are_compared_in_a_report_without_scripts(tmp_path, capsys):
    assert simulate("--duration", "20s", "--rate", 2, "--slots", 2, 8, "--p99", 1.2, "--out", tmp_path / "out") == 0
    assert "least-slack, 2 slots" in capsys.readouterr().out
    rows = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
    assert [row["p99_s"] <= 1.2 for row in rows] == [True, True]
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<svg") == 2 and "<script" not in page


def test_a_trace_can_be_written_and_simulated(tmp_path, capsys):
    file = tmp_path / "trace.csv"
    assert simulate("--duration", "10s", "--rate", 3, "--write-trace", file) == 0
    assert simulate("--trace", file, "--canary", 0.5) == 0
    assert "canary 0.5" in capsys.readouterr().out


def test_clients_are_compared_by_policy_and_width_slack(tmp_path, capsys):
    file = tmp_path / "clients.json"
    file.write_text('[{"name": "large", "images": 8}, {"name": "small", "clients": 2}]')
    flags = ("--policy", "fair", "fcfs", "--fair-width-slack", 0, 0.1, "--out", tmp_path / "out")
    assert simulate("--clients", file, "--duration", "30s", *flags) == 0
    printed = capsys.readouterr().out
    assert "small: 2 clients with a request of an image, 20 steps, at any time" in printed
    rows = json.loads((tmp_path / "out" / "results.json").read_text())["rows"]
    assert [row["scenario"] for row in rows[::2]] == ["fair 0, 8 slots", "fair 0.1, 8 slots", "fcfs, 8 slots"]
    assert printed.count("| small × 2 |") == printed.count("| all |") == 3


@pytest.mark.parametrize("flags", [("--rate", 2), ("--canary", 0.5), ("--engine", "fast"), ("--p99", 1)], ids=str)
def test_clients_take_no_other_traffic(flags):
    with pytest.raises(SimulateError, match="--clients"):
        simulate("--clients", *flags)


def measured_run(latencies_s, **changes):
    """A run whose requests do not meet; alone, one takes 0.574 s in the engine and 0.026 s outside it."""
    records = tuple(
        RequestRecord(
            number, 9.0 * number, 9.0 * number, 9.0 * number + latency_s, 200, None, "", 40.0, 1,
            engine_s=latency_s - 0.026, width_px=512, height_px=512, num_calls=20, call_rows=2,
        )
        for number, latency_s in enumerate(latencies_s)
    )  # fmt: skip
    run = BenchRun(
        "mixed", "noria", Traffic("open", 30.0, "mixed"), {}, {},
        {"policy": "least-slack", "queue_limit": 256, "queue_limit_s": 120.0}, records, variant="poisson",
        engine_costs=msgspec.to_builtins(EXAMPLE, str_keys=True),
    )  # fmt: skip
    return msgspec.structs.replace(run, **changes)


def test_measured_runs_are_simulated_with_their_requests_and_costs(tmp_path, capsys):
    write_run(measured_run([0.6, 0.6, 0.6]), tmp_path)
    write_run(measured_run([0.5, 0.5, 0.5], variant="bursty", usage=ResourceUsage(other_cpu_share=0.4)), tmp_path)
    assert simulate("--calibrate", tmp_path, "--out", tmp_path / "out") == 0
    printed = capsys.readouterr().out
    assert "| poisson | 3 | 0.600 | 0.600 | 1.00 × | 0.600 | 0.600 | 1.00 × | 1.00 | 26.0 | 0.0 % |" in printed
    assert "| bursty | 3 | 0.500 | 0.600 | 1.20 × |" in printed
    assert "measure it again, alone" in printed
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<svg") == 2 and "<script" not in page


@pytest.mark.parametrize("changes", [{"engine_costs": {}}, {"complete": False}, {"records": ()}])
def test_a_folder_without_a_usable_run_says_how_to_make_one(tmp_path, changes):
    write_run(measured_run([0.6], **changes), tmp_path)
    with pytest.raises(SimulateError, match="noria bench mixed --targets noria --out"):
        simulate("--calibrate", tmp_path)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--policy", "lifo"], "policies are fair, least-slack, fcfs, shortest-first"),
        (["--autoscale", "1-4", "--p99", "2"], "use one of them"),
        (["--engine", "fast", "--failures", "1h"], "no failures"),
        (["--rate", "1000000", "--duration", "30d"], "are more than the 100,000,000 of the fast engine"),
        (["--shapes", "/nowhere"], "No such file"),
        (["--p99", "0.5"], "20 steps with guidance alone on a device takes 0.574 s"),
        (["--rate", "0.000001", "--duration", "1s"], "no request arrives"),
        (["--trace", "/nowhere", "--rate", "5"], "leave out --rate"),
        (["--calibrate", "/nowhere", "--device", "gpu.json"], "leave out --device"),
        (["--calibrate", "/nowhere", "--rate", "5"], "leave out --rate"),
        (["--write-trace", "/nowhere/trace.csv"], "/nowhere/trace.csv cannot be written"),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags, message):
    with pytest.raises(SimulateError, match=message):
        simulate(*flags)


@pytest.mark.parametrize(
    "flags", [["--rate", "0"], ["--duration", "99d"], ["--autoscale", "4-2"], ["--slots", "x"], ["--spot", "1s"]]
)
def test_values_that_are_not_allowed_are_refused(flags, capsys):
    with pytest.raises(SystemExit):
        simulate(*flags)
    error = capsys.readouterr().err
    assert flags[0] in error and repr(flags[1]) in error


def test_a_folder_that_cannot_be_written_is_said_before_the_simulation(tmp_path, capsys):
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", "/proc/self"):
        with pytest.raises(ConfigError, match="cannot be written"):
            simulate("--rate", 50, "--duration", "16m", "--out", out)
    assert capsys.readouterr().out == ""


def test_the_reasons_of_what_is_not_served_are_said(tmp_path, capsys):
    assert simulate("--rate", 30, "--duration", "10s", "--queue-limit", 5, "--out", tmp_path) == 0
    unserved = json.loads((tmp_path / "results.json").read_text())["rows"][0]["unserved"]
    assert set(unserved) == {"rejected"}
    assert f"{unserved['rejected']:,} rejected" in capsys.readouterr().out


def test_devices_that_are_scaled_are_said_as_mean_and_maximum(tmp_path, capsys):
    flags = ["--rate", 6, "--duration", "60s", "--autoscale", "1-3", "--target-backlog", 1]
    assert simulate(*flags, "--out", tmp_path) == 0
    row = json.loads((tmp_path / "results.json").read_text())["rows"][0]
    assert 1 < row["devices"] < row["max_devices"] == 3
    assert "there were 3 at most" in capsys.readouterr().out


def test_spot_devices_need_a_price(tmp_path):
    file = tmp_path / "gpu.json"
    file.write_text('{"steps": [{"width_px": 64, "height_px": 64, "seconds": {"1": 0.1}}]}')
    with pytest.raises(SimulateError, match="needs spot_price_per_hour"):
        simulate("--spot", "1h", "--device", file)


def test_errors_are_one_line(capsys):
    parser = Parser(prog="noria")
    add_to(parser.add_subparsers(required=True))
    assert run(parser.parse_args(["simulate", "--policy", "lifo"])) == 2
    assert capsys.readouterr().err.count("\n") == 1
