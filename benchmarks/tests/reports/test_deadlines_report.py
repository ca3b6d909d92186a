"""The contract bench's summary, from runs whose every request is planted."""

import json
import xml.etree.ElementTree as ET

import pytest

from noria_bench.measurement.run_metrics import RequestRecord
from noria_bench.reports import deadlines_report
from noria_bench.reports.deadlines_report import DeadlineRun, summarise, summarise_errors, summarise_run
from noria_bench.reports.plots.deadlines_plots import plot_runs

SECONDS = 10.0


def record(number, *, met=True, status=200, predicted_s=None, digest="same", rows=40.0):
    at = number * 0.1
    done_s = at + (1.0 if met else 3.0)
    return RequestRecord(number, at, at, done_s, status, 2.0, "normal", rows, 1, predicted_s, None, digest)


def run(target, load, num_met, num_missed, memory=(), **fields):
    """A hundred requests a run at most, ten a second."""
    records = [record(k, met=k < num_met, **fields) for k in range(num_met + num_missed)]
    return DeadlineRun(target, load, SECONDS, tuple(records), tuple(memory))


def test_ratios_are_of_the_attainment_at_the_same_load():
    runs = [run("least-slack", 90, 9, 1), run("fcfs", 90, 6, 4), run("seed", 90, 3, 7), run("least-slack", 130, 8, 2)]
    summary = summarise(runs, {})
    assert summary["attainment_over_seed"] == {"90": pytest.approx(3.0), "130": None}
    assert summary["attainment_over_fcfs"]["90"] == pytest.approx(1.5)


def test_nobody_served_by_the_other_is_a_ratio_that_cannot_be_said():
    assert summarise([run("least-slack", 90, 9, 1), run("seed", 90, 0, 10)], {})["attainment_over_seed"]["90"] is None


def test_overload_is_judged_by_its_worst_load_against_the_best_of_all():
    runs = [run("fcfs", 90, 80, 0), run("fcfs", 110, 78, 10), run("fcfs", 150, 60, 40)]
    found = summarise(runs, {})["overload_goodput_over_peak"]["fcfs"]["requests"]
    assert found == pytest.approx(runs[2].goodput() / runs[0].goodput(), abs=1e-4)
    assert 0.7 < found < 0.8


def test_refusals_are_told_from_other_failures():
    records = (record(0), record(1, status=429), record(2, status=504), record(3, status=500), record(4, status=0))
    found = summarise_run(DeadlineRun("fcfs", 90, SECONDS, records, ()))
    assert (found["requests"], found["refused"], found["expired"], found["other_failures"]) == (5, 1, 1, 2)
    assert found["attainment"] == pytest.approx(0.2)
    assert found["latency_s"]["p99"] is None  # endless


def test_predictions_are_judged_at_steady_load_and_under_the_default_policy_only():
    runs = [
        run("least-slack", 75, 9, 0, predicted_s=1.1),  # took 1.0
        run("least-slack", 90, 1, 0, predicted_s=2.0),
        run("least-slack", 110, 50, 0, predicted_s=9.0),
        run("fcfs", 75, 50, 0, predicted_s=9.0),
    ]
    found = summarise(runs, {})["open_loop_prediction"]
    assert (found["requests"], found["within_bound"]) == (10, 0.9)


def test_memory_that_grows_is_seen():
    flat = [(k / 4, 1000) for k in range(60)]
    growing = [(at, 1000 + int(100 * at)) for at, _ in flat]
    runs = [run("fcfs", 110, 5, 5, flat), run("fcfs", 150, 5, 5, growing), run("seed", 90, 5, 5, growing)]
    found = summarise(runs, {})["overload_memory_growth"]
    assert found["fcfs"] == pytest.approx(1900 / 1100, rel=0.02)
    assert found["seed"] is None  # was never overloaded


def test_files_that_differ_between_runs_are_counted():
    runs = [run("fcfs", 90, 2, 0), run("least-slack", 90, 2, 0), run("seed", 90, 2, 0, digest="others")]
    assert summarise(runs, {})["equal_files"] == 1.0
    assert summarise([*runs, run("fcfs", 110, 1, 0, digest="else")], {})["equal_files"] == 0.5


@pytest.fixture
def document():
    runs = [run("least-slack", 90, 9, 1, predicted_s=1.0), run("seed", 90, 5, 5), run("least-slack", 130, 8, 2)]
    return {
        "summary": summarise(runs, {"as it is": [0, 1, 0]}),
        "steady": summarise_errors([0.1, -0.2]),
        "capacity": {"noria": {"rows_per_s": 200.0, "images_per_s": 5.0, "requests_per_s": 4.0}},
        "model": {"name": "m"},
        "options": {"mix": "mixed", "arrivals": "poisson", "seconds": 10.0},
        "machine": {"cores": 2, "cpu": "Test CPU", "load_average_before": 0.5},
        "noria": "0",
        "commit": "abc",
        "date": "2026-01-01T00:00:00",
        "complete": False,
    }


def test_the_tables_show_each_target_at_each_load_and_a_dash_where_nothing_ran(document):
    text = deadlines_report.tables(document)
    assert "| attainment | 90 % | 130 % |" in text
    assert "| least-slack | 0.90 | 0.80 |" in text
    assert "| seed | 0.50 | – |" in text
    assert "| least-slack / seed | 1.80 | – |" in text
    assert "largest difference of a channel: 1/255 (as it is)." in text
    assert "2 cores of Test CPU" in text
    assert "incomplete" in text


def test_the_summary_is_json_without_nan(document):
    json.dumps(document, allow_nan=False)


def test_the_pictures_are_svg_and_the_same_each_time(tmp_path):
    runs = [run(target, load, 8, 2) for target in ("least-slack", "seed") for load in (50, 75, 90, 110)]
    files = plot_runs(runs, tmp_path / "plots")
    assert [file.name for file in files] == ["attainment.svg", "goodput.svg", "latency.svg"]
    first = [file.read_bytes() for file in files]
    assert all(ET.fromstring(text).tag.endswith("svg") for text in first)
    assert [file.read_bytes() for file in plot_runs(runs, tmp_path / "plots")] == first
