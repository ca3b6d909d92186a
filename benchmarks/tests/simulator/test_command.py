"""The command: its output, and bad flags."""

import json

import msgspec
import pytest

from noria.cli.main import run
from noria.cli.parser import Parser
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


def test_a_simulation_is_compared_with_a_measured_run(tmp_path, capsys):
    (tmp_path / "trace.csv").write_text("arrival_s,steps,latency_s\n0,20,0.5\n9,20,0.5\n18,20,\n")
    (tmp_path / "costs.json").write_bytes(msgspec.json.encode(EXAMPLE))
    assert simulate("--calibrate", tmp_path) == 0
    assert "| p50 | 0.500 | 0.574 | +14.8% |" in capsys.readouterr().out
    (tmp_path / "trace.csv").write_text("arrival_s,steps,latency_s\n0,20,fast\n")
    with pytest.raises(SimulateError, match="line 2: latency_s is 'fast'"):
        simulate("--calibrate", tmp_path)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--policy", "lifo"], "policies are least-slack, fcfs, shortest-first"),
        (["--spot", "1h"], "needs spot_price_per_hour"),
        (["--autoscale", "1-4", "--p99", "2"], "use one of them"),
        (["--engine", "fast", "--failures", "1h"], "no failures"),
        (["--rate", "1000000", "--duration", "30d"], "are more than the 100,000,000 of the fast engine"),
        (["--shapes", "/nowhere"], "No such file"),
    ],
)
def test_flags_that_do_not_fit_are_refused(flags, message):
    with pytest.raises(SimulateError, match=message):
        simulate(*flags)


@pytest.mark.parametrize("flags", [["--rate", "0"], ["--duration", "5"], ["--autoscale", "4-2"], ["--slots", "x"]])
def test_values_that_are_not_allowed_are_refused(flags, capsys):
    with pytest.raises(SystemExit):
        simulate(*flags)
    assert flags[0] in capsys.readouterr().err


def test_errors_are_one_line(capsys):
    parser = Parser(prog="noria")
    add_to(parser.add_subparsers(required=True))
    assert run(parser.parse_args(["simulate", "--policy", "lifo"])) == 2
    assert capsys.readouterr().err.count("\n") == 1
