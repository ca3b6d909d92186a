"""The tables of the deadlines bench, from synthetic runs."""

import math

import pytest
from synthetic_runs import run

from noria_bench.measurement.run_metrics import RequestRecord
from noria_bench.measurement.runs import ResourceUsage, Traffic
from noria_bench.reports.deadlines import (
    attainment_ratio,
    deadline_summary,
    deadline_tables,
    equal_files_share,
    memory_growth,
    open_loop_errors,
    overload_ratio,
    run_goodput,
)
from noria_bench.reports.run_groups import group_runs
from noria_bench.reports.run_summary import finite_json
from noria_bench.reports.sections import raw_summaries
from noria_bench.reports.writer import write_report

SECONDS = 10.0
CALIBRATION = {
    "capacity": {"noria": {"rows_per_s": 200.0, "images_per_s": 5.0, "requests_per_s": 4.0}},
    "max_channel_differences": {"default": [0, 1, 0]},
    "steady_predictions": {"num_requests": 2, "within_bound": 0.5, "p5": -0.2, "p50": 0.0, "p95": 0.1},
}


def deadline_record(number, *, met=True, status=200, predicted_s=None, digest="same", rows=40.0):
    at = number * 0.1
    done_s = at + (1.0 if met else 3.0)
    return RequestRecord(number, at, at, done_s, status, 2.0, "normal", rows, 1, predicted_s, None, digest)


def deadline_run(policy, load, num_met=0, num_missed=0, *, records=None, memory=(), **fields):
    """At most a hundred requests, ten per second."""
    found = [deadline_record(k, met=k < num_met, **fields) for k in range(num_met + num_missed)]
    reference = policy == "reference-batched"
    return run(
        policy if reference else "noria",
        found if records is None else records,
        "deadlines",
        traffic=Traffic("open", SECONDS, "mixed", arrivals="poisson", rows_per_s=80.0, load_percent=load),
        variant=f"{load} %" if reference else f"{load} % {policy}",
        settings={"policy": "least-slack" if reference else policy},
        usage=ResourceUsage(tuple(at for at, _ in memory), (), tuple(held for _, held in memory)),
        calibration=CALIBRATION,
    )


def group(*runs):
    (only,) = group_runs(runs)
    return only


def table(title, *runs):
    return next(each for each in deadline_tables(group(*runs)) if each.title == title)


def test_ratios_are_of_the_attainment_at_the_same_load():
    found = group(
        deadline_run("least-slack", 90, 9, 1),
        deadline_run("fcfs", 90, 6, 4),
        deadline_run("reference-batched", 90, 3, 7),
        deadline_run("least-slack", 130, 8, 2),
    )
    assert attainment_ratio(found, 90, "reference-batched") == pytest.approx(3.0)
    assert attainment_ratio(found, 90, "fcfs") == pytest.approx(1.5)
    assert math.isnan(attainment_ratio(found, 130, "reference-batched"))


def test_a_ratio_to_an_attainment_of_zero_is_not_printed():
    runs = deadline_run("least-slack", 90, 9, 1), deadline_run("reference-batched", 90, 0, 10)
    assert table("Ratio of attainment", *runs).rows[0] == ("least-slack / reference-batched", "–")


def test_overload_is_judged_by_its_worst_load_against_the_best_of_all():
    runs = [deadline_run("fcfs", 90, 80, 0), deadline_run("fcfs", 110, 78, 10), deadline_run("fcfs", 150, 60, 40)]
    found = overload_ratio(group(*runs), "fcfs")
    assert found == pytest.approx(run_goodput(runs[2]) / run_goodput(runs[0]))
    assert 0.7 < found < 0.8


def test_rejected_and_expired_requests_are_distinguished_from_other_failures():
    records = [deadline_record(k, status=status) for k, status in enumerate((200, 429, 504, 500, 0))]
    found = deadline_summary(deadline_run("fcfs", 90, records=records))
    assert (found["num_rejected"], found["num_expired"]) == (1, 1)
    assert found["attainment"] == pytest.approx(0.2)
    assert found["attainment_by_deadline_class"] == {"normal": pytest.approx(0.2)}


def test_predictions_are_judged_at_steady_load_and_under_the_default_policy_only():
    found = group(
        deadline_run("least-slack", 75, 9, 0, predicted_s=1.1),  # took 1.0
        deadline_run("least-slack", 90, 1, 0, predicted_s=2.0),
        deadline_run("least-slack", 110, 50, 0, predicted_s=9.0),
        deadline_run("fcfs", 75, 50, 0, predicted_s=9.0),
    )
    errors = open_loop_errors(found)
    assert len(errors) == 10
    assert sum(abs(error) <= 0.15 for error in errors) == 9


def test_growing_memory_is_reported_for_loads_above_100_percent_only():
    flat = [(k / 4, 1000) for k in range(60)]
    growing = [(at, 1000 + int(100 * at)) for at, _ in flat]
    runs = [
        deadline_run("fcfs", 110, 5, 5, memory=flat),
        deadline_run("fcfs", 150, 5, 5, memory=growing),
        deadline_run("reference-batched", 90, 5, 5, memory=growing),
    ]
    assert memory_growth(runs[1]) == pytest.approx(1900 / 1100, rel=0.02)
    assert [row[-1] for row in table("Above 100 %", *runs).rows] == [f"{memory_growth(runs[1]):.2f}", "–"]


def test_files_that_differ_between_runs_are_counted():
    runs = [
        deadline_run("fcfs", 90, 2, 0),
        deadline_run("least-slack", 90, 2, 0),
        deadline_run("reference-batched", 90, 2, 0, digest="others"),
    ]
    assert equal_files_share(runs) == 1.0
    assert equal_files_share([*runs, deadline_run("fcfs", 110, 1, 0, digest="else")]) == 0.5


@pytest.fixture
def runs():
    return [
        deadline_run("least-slack", 90, 9, 1, predicted_s=1.0),
        deadline_run("reference-batched", 90, 5, 5),
        deadline_run("least-slack", 130, 8, 2),
    ]


def test_the_tables_have_a_row_for_each_policy_and_a_dash_where_nothing_ran(runs):
    attainment = table("Attainment", *runs)
    assert attainment.columns == ("Policy", "90 %", "130 %")
    assert attainment.rows == (("least-slack", "0.90", "0.80"), ("reference-batched", "0.50", "–"))
    assert table("Ratio of attainment", *runs).rows[0] == ("least-slack / reference-batched", "1.80", "–")
    assert table("Capacity", *runs).rows == (("noria", "200", "5.00", "4.00"),)
    assert table("Same seed alone and among 32 requests", *runs).rows == (("default", "1/255"),)
    assert table("Predictions", *runs).rows[0][:3] == ("8 users", "2", "0.50")


def test_the_report_has_the_tables_and_one_plot_and_is_the_same_each_time(runs, tmp_path):
    first, second = write_report(tmp_path / "a", runs), write_report(tmp_path / "b", runs)
    assert [file.name for file in first] == ["report.md", "report.html", "deadlines-load.svg"]
    assert [file.read_bytes() for file in first] == [file.read_bytes() for file in second]
    text = first[0].read_text(encoding="utf-8")
    assert "## Deadlines: policies by load" in text
    assert "| least-slack | 0.90 | 0.80 |" in text
    assert "80 rows of work per second (90 % of Noria's capacity)" in text


def test_the_raw_summaries_have_what_concerns_deadlines_as_finite_json(runs):
    summary = raw_summaries(runs)[0]["summary"]
    assert summary["attainment"] == 0.9
    assert summary["memory_growth"] is None
    assert finite_json({"p99": math.inf, "values": (1.23456,)}) == {"p99": None, "values": [1.2346]}
