"""The tables in the reference article's form, and the goals, of synthetic runs."""

import pytest
from synthetic_runs import CLOSED, PROVENANCE, record, run

from noria_bench.measurement.runs import ImageCheck, ResourceUsage, Traffic
from noria_bench.reports.comparison_tables import overview_table, performance_table, reference_table, resource_table
from noria_bench.reports.goals import goals_of
from noria_bench.reports.provenance_text import noria_text, provenance_lines, traffic_lines
from noria_bench.reports.run_groups import group_runs, variant_numbers
from noria_bench.reports.table import Table

OPEN = Traffic("open", 10.0, "mixed", arrivals="poisson", rows_per_s=80.0)


def group(*runs):
    (only,) = group_runs(runs)
    return only


def steady(target, count, latency_s=1.0, **fields):
    """`count` requests, all done within the run's ten seconds."""
    return run(target, [record(k, latency_s, start_s=k * 4 / count) for k in range(count)], **fields)


def cell(table, row, column):
    found = next(cells for cells in table.rows if cells[0] == row)
    return found[table.columns.index(column)]


def test_a_scenario_s_table_has_the_article_s_columns_and_both_ratios():
    table = performance_table(
        group(steady("reference-batched", 10), steady("noria", 25, 0.5), steady("reference-stream-sync", 5))
    )
    assert table.columns[:8] == (
        "Implementation", "Requests", "Avg (ms)", "RPS", "p50 (ms)", "p90 (ms)", "p95 (ms)", "p99 (ms)"
    )  # fmt: skip
    assert [row[0] for row in table.rows] == ["noria", "reference-stream-sync", "reference-batched"]
    assert table.rows[0][1:8] == ("25", "500", "2.50", "500", "500", "500", "500")
    assert cell(table, "noria", "RPS / reference-batched") == "2.50 ×"
    assert cell(table, "noria", "Reference: RPS / reference-batched") == "–"
    assert cell(table, "reference-stream-sync", "Reference: RPS / reference-batched") == "0.27 ×"  # 264 of 975


def test_a_mixed_closed_loop_is_compared_with_the_reference_and_with_uniform_requests():
    def users(mix, variant):
        return {"bench": "mixed", "variant": variant, "traffic": Traffic("closed", 10.0, mix, num_users=8)}

    mixed, uniform = users("mixed-settings", "8 users"), users("uniform", "8 users, uniform")
    half_done = record(30, 4.0, start_s=8.0)  # half of its rows are done within the ten seconds
    found = group(
        run("noria", [*steady("noria", 20).records, half_done], **mixed),
        steady("noria", 25, **uniform),
        steady("reference-batched", 10, **mixed),
        steady("reference-batched", 20, **uniform),
    )
    table = performance_table(found)
    assert [row[0] for row in table.rows] == [
        "noria",
        "noria (uniform)",
        "reference-batched",
        "reference-batched (uniform)",
    ]
    assert [cell(table, row[0], "Rows/s") for row in table.rows] == ["82.0", "100.0", "40.0", "80.0"]
    assert [cell(table, row[0], "Rows/s / uniform") for row in table.rows] == ["0.82 ×", "–", "0.50 ×", "–"]
    assert cell(table, "noria", "RPS / reference-batched") == "2.00 ×"
    assert cell(table, "noria (uniform)", "RPS / reference-batched") == "1.25 ×"
    assert [goal.met for goal in goals_of(found)] == [None, None, True, False]
    assert overview_table(found.runs).rows[0] == ("noria", "2.00", "1000", "3400")


def test_without_the_batched_target_there_is_no_ratio_of_ours():
    table = performance_table(group(steady("noria", 10), steady("reference-stream-sync", 5)))
    assert "RPS / reference-batched" not in table.columns
    assert "Reference: RPS / reference-batched" in table.columns


def test_a_run_without_successes_is_a_row_of_dashes_with_a_note():
    table = performance_table(
        group(run("noria", [record(k, status=500) for k in range(4)]), steady("reference-batched", 10))
    )
    row = table.rows[0]
    assert row[:8] == ("noria", "4", "–", "0.00", "–", "–", "–", "–")
    assert cell(table, "noria", "Failures") == "4"
    assert "latency is infinite" in table.notes[-1]


def test_an_interrupted_run_is_marked_in_its_row():
    assert performance_table(group(steady("noria", 10, complete=False))).rows[0][0] == "noria (interrupted)"


def test_resources_omit_columns_without_measurements():
    usage = ResourceUsage((0.0,), (1.5,), (2**30,), (0.5,), (2**31,), 30.0, 0.25)
    checks = (ImageCheck(0, None), ImageCheck(1, 9.0, "another image"))
    table = resource_table(
        group(steady("noria", 10, usage=usage, image_checks=checks), steady("reference-batched", 10))
    )
    assert cell(table, "noria", "CPU cores, mean") == "1.50"
    assert cell(table, "noria", "GPU memory, mean") == "2.00 GiB"
    assert cell(table, "noria", "GPU utilisation, mean") == "50.0 %"
    assert cell(table, "noria", "Energy/image") == "3.0 J"
    assert cell(table, "noria", "Incorrect images") == "1 of 2"
    assert cell(table, "reference-batched", "Reference: GPU utilisation") == "80.3 %"
    assert "Time to ready" not in table.columns


def test_a_batching_sweep_is_compared_with_the_article_s_defaults():
    variants = (("250 ms, 8", 8), ("500 ms, 16", 12), ("500 ms, 8", 10))
    table = performance_table(
        group(*(steady("reference-batched", n, bench="batching", variant=name) for name, n in variants))
    )
    assert [row[0] for row in table.rows] == ["250 ms, 8", "500 ms, 8", "500 ms, 16"]  # by their numbers
    assert cell(table, "500 ms, 16", "RPS / 500 ms, 8") == "1.20 ×"
    assert cell(table, "500 ms, 16", "Reference: RPS / 500 ms, 8") == "0.93 ×"  # 1051 of 1131


def test_a_sweep_of_two_targets_compares_each_with_its_own_first():
    counts = {
        ("reference-batched", "off"): 10,
        ("reference-batched", "on"): 12,
        ("noria", "off"): 20,
        ("noria", "on"): 30,
    }
    runs = [steady(target, n, bench="sweep-channels-last", variant=name) for (target, name), n in counts.items()]
    table = performance_table(group(*runs))
    assert cell(table, "noria: on", "RPS / first of the target") == "1.50 ×"
    assert cell(table, "reference-batched: on", "RPS / first of the target") == "1.20 ×"
    assert cell(table, "reference-batched: on", "Reference: RPS / first of the target") == "1.16 ×"  # 1316 of 1131
    assert cell(table, "noria: on", "Reference: RPS / first of the target") == "–"


def test_the_ablation_is_compared_with_the_same_row_as_the_article_s():
    variants = {"memory-efficient": 10, "sliced": 8, "neither": 9}
    found = group(*(steady("reference-batched", n, bench="attention", variant=name) for name, n in variants.items()))
    table = performance_table(found)
    assert cell(table, "sliced", "RPS / memory-efficient") == "0.80 ×"
    assert cell(table, "sliced", "Reference: RPS / memory-efficient") == "0.85 ×"  # 957 of 1131
    theirs = reference_table(found)
    assert [row[1] for row in theirs.rows] == ["975", "932", "957", "1131"]
    assert cell(theirs, "sliced", "RPS / memory-efficient") == "0.85 ×"
    assert any("Spanish" in note for note in theirs.notes)


def test_without_the_articles_defaults_both_ratios_are_of_the_first_settings_that_were_run():
    found = group(
        *(steady("reference-batched", 10, bench="batching", variant=name) for name in ("250 ms, 8", "500 ms, 16"))
    )
    assert cell(performance_table(found), "500 ms, 16", "Reference: RPS / 250 ms, 8") == "0.94 ×"  # 1051 of 1121


def test_what_the_article_did_not_try_has_no_table_of_its():
    assert reference_table(group(steady("noria", 10, bench="slots", variant="8"))) is None
    assert reference_table(group(steady("noria", 10, bench="mixed", variant="poisson", traffic=OPEN))) is None


def test_scenarios_come_first_then_arrivals_then_sweeps():
    mixed = [
        steady("noria", 5, bench="mixed", variant=kind, traffic=Traffic("open", 9, "mixed", arrivals=kind))
        for kind in ("poisson", "bursty")
    ]
    found = group_runs([steady("noria", 5, bench="slots", variant="8"), *mixed, steady("noria", 5, bench="scenario1")])
    assert [each.slug for each in found] == ["scenario1", "mixed-bursty", "mixed-poisson", "slots"]
    assert [each.is_sweep for each in found] == [False, False, False, True]


def test_a_variant_follows_its_target():
    found = group(steady("reference-stream-sync", 5, variant="chunked"), steady("reference-stream-sync", 5))
    assert [found.label(each) for each in found.runs] == ["reference-stream-sync (chunked)", "reference-stream-sync"]


@pytest.mark.parametrize(
    ("variant", "numbers"),
    [("250 ms, 8", (250, 8)), ("0.5 s, 16 images", (0.5, 16)), ("8 slots, fcfs", None), ("8", None), ("", None)],
)
def test_two_numbers_of_a_variant_are_a_point_of_a_grid(variant, numbers):
    assert variant_numbers(variant) == numbers


def goals_of_steady(**figures):
    """The goals of targets with so many requests, each of so many seconds."""
    traffic = {"bench": "mixed", "variant": "poisson", "traffic": OPEN}
    return goals_of(group(*(steady(name.replace("_", "-"), *each, **traffic) for name, each in figures.items())))


def test_goals_that_are_met():
    goals = goals_of_steady(noria=(40, 0.4), reference_batched=(20, 2.0), ray=(30, 1.0), litserve=(10, 0.7),
                            bentoml=(10, 0.9), triton_50ms=(9, 0.9))  # fmt: skip
    assert [goal.met for goal in goals] == [True] * 4
    words = ("best framework ray 3.00", "best framework litserve 700 ms", "2.00 × (4.00 to 2.00)",
             "0.20 (400 ms to 2000 ms)")  # fmt: skip
    assert all(word in goal.text for word, goal in zip(words, goals, strict=True))


def test_goals_that_are_missed_say_by_how_much():
    goals = goals_of_steady(noria=(30, 1.0), reference_batched=(20, 2.0), ray=(40, 0.8))
    assert [goal.verdict for goal in goals] == ["Missed"] * 4
    words = ("25.0 % behind", "25.0 % longer", "25.0 % short", "2.00 times the goal")
    assert all(word in goal.text for word, goal in zip(words, goals, strict=True))


def test_an_infinite_p99_misses_against_a_finite_one_and_is_undecided_against_another():
    def goals(ours, theirs):
        answered = {"noria": ours, "ray": theirs, "litserve": False, "bentoml": False, "triton-0ms": False}
        found = [run(name, [record(0, answered=each)]) for name, each in answered.items()]
        return goals_of(group(*found))[1].met

    assert (goals(False, True), goals(True, False), goals(False, False)) == (False, True, None)


def test_the_goal_against_frameworks_is_met_only_if_all_were_measured():
    ahead, behind = (goals_of(group(steady("noria", 10), steady("ray", theirs)))[0] for theirs in (8, 12))
    assert (ahead.met, behind.met) == (None, False)
    assert "litserve, bentoml, triton not measured" in ahead.text


def test_an_interrupted_run_meets_and_misses_no_goal():
    frameworks = [steady(name, 8) for name in ("litserve", "bentoml", "ray", "triton-500ms")]
    assert [goal.met for goal in goals_of(group(steady("noria", 10, complete=False), *frameworks))] == [None]
    frameworks[0] = steady("litserve", 20, complete=False)
    assert [goal.met for goal in goals_of(group(steady("noria", 10), *frameworks))] == [None, None]


def test_goals_are_undecided_without_the_targets_that_they_compare():
    mixed = {"bench": "mixed", "variant": "poisson", "traffic": OPEN}
    assert [goal.met for goal in goals_of(group(steady("noria", 10, **mixed)))] == [None] * 4
    assert [goal.met for goal in goals_of(group(steady("ray", 10)))] == [None]
    assert goals_of(group(steady("noria", 10, bench="scenario1"))) == []


def test_the_overview_has_a_row_for_each_target_and_three_columns_for_each_bench():
    mixed = steady("noria", 20, bench="mixed", variant="poisson", traffic=OPEN)
    failing = run("ray", [record(k, status=500) for k in range(3)])
    table = overview_table([steady("noria", 10), failing, mixed, steady("noria", 5, bench="scenario1")])
    assert table.columns[1:] == (
        "scenario2: RPS", "scenario2: p50 (ms)", "scenario2: p99 (ms)",
        "mixed poisson: RPS", "mixed poisson: p50 (ms)", "mixed poisson: p99 (ms)",
    )  # fmt: skip
    assert table.rows == (
        ("noria", "1.00", "1000", "1000", "2.00", "1000", "1000"),
        ("ray", "0.00", "–", "–", "–", "–", "–"),
    )
    assert "ray 3 of 3 in scenario2" in table.notes[0]


def test_markdown_cells_are_escaped():
    table = Table("t", ("a", "b"), (("x|y\nz", "<script>`*[1](u)"),))
    assert table.markdown().splitlines()[2] == r"| x\|y z | &lt;script&gt;\`\*\[1\](u) |"


def test_provenance_has_machine_commit_versions_command_date_and_load():
    later = {
        **PROVENANCE,
        "date": "2026-11-21T13:30:00+00:00",
        "machine": PROVENANCE["machine"] | {"load_average_before": 0.5},
    }
    (line,) = provenance_lines([run(), run("ray", provenance=later)])
    for part in (
        "2 cores of A CPU",
        "8.0 GiB",
        "noria 0.1.0 at 0123456789ab",
        "torch 2.13.0",
        "noria bench scenario2 --targets all",
    ):
        assert part in line
    assert "2026-11-21 12:00 UTC to 2026-11-21 13:30 UTC; load before 0.25 to 0.50" in line
    assert noria_text(PROVENANCE | {"commit": None}) == "noria 0.1.0"  # from a wheel


def test_runs_of_two_machines_have_a_warning():
    other = {**PROVENANCE, "machine": PROVENANCE["machine"] | {"cpu": "Another"}}
    lines = provenance_lines([run(), run("ray", provenance=other)])
    assert len(lines) == 3
    assert "not comparable" in lines[2]


def test_traffic_is_described():
    assert traffic_lines([run(traffic=CLOSED), run("ray", traffic=CLOSED)]) == [
        "Closed: 8 users, one more every 1 s; each sends the next request when answered; "
        "uniform requests, 10 s per run, seed 1."
    ]
    assert traffic_lines([run(traffic=Traffic("closed", 9.5, "uniform", num_users=1, spawn_interval_s=50.0))]) == [
        "Closed: 1 user; each sends the next request when answered; uniform requests, 9.5 s per run, seed 1."
    ]
    (line,) = traffic_lines([run(traffic=OPEN)])
    assert line.startswith("Open: poisson arrivals, 80 rows of work per second; latency counts from the intended start")
