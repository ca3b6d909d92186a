"""`noria bench deploys`: its figures, its report, and one real run."""

import pytest

from noria.config import Config
from noria_bench.deploys import bench
from noria_bench.deploys.options import DeploysOptions
from noria_bench.deploys.report import write_report
from noria_bench.deploys.results import DeploysResult, DeploysRun, Latencies, Phase, Span, num_failed, phases_of
from noria_bench.load.closed_loop import Reply
from noria_bench.measurement.provenance import collect_provenance

OPTIONS = {"image_users": 8, "text_users": 64, "pause_s": 1.0}


def test_a_request_counts_in_the_phase_in_which_it_was_sent():
    images = [Reply(0.5, 3.5, 200, 9), Reply(1.5, 2.0, 200, 9), Reply(1.9, 2.0, 503, 9)]
    before, loading = phases_of([Span("before", 0.0, 1.0), Span("loading", 1.0, 2.0)], {"images": images, "texts": []})
    assert before.by_kind == {"images": Latencies(1, 0, 3000.0, 3000.0), "texts": Latencies(0, 0, None, None)}
    assert loading.by_kind["images"] == Latencies(1, 1, 500.0, 500.0)


def run(niceness, number, p99_ms, num_failed=0):
    def phase(name, factor):
        found = Latencies(10, num_failed, 10.0, factor * p99_ms)
        return Phase(name, 5.0, {"images": found, "texts": found})

    return DeploysRun(niceness, number, [phase("before", 1.0), phase("images: loading", 1.5)])


def test_the_report_has_each_phase_by_niceness_with_ratios_within_a_server(tmp_path):
    runs = [run(19, 0, 20.0), run(0, 0, 40.0), run(0, 1, 60.0), run(19, 1, 30.0)]
    result = DeploysResult(collect_provenance(), {"images": "i", "texts": "t"}, OPTIONS, runs, complete=True)
    report, plot = write_report(result, tmp_path)
    text = report.read_text(encoding="utf-8")
    assert "| niceness 19, before | 5.0 | 20 | 0 | 10.0 | 25.0 | 1.00 × |" in text
    assert "| niceness 0, images: loading | 5.0 | 20 | 0 | 10.0 | 75.0 | 1.50 × |" in text
    assert "No request failed." in text and "Interrupted" not in text
    assert b"<svg" in plot.read_bytes()
    assert num_failed([run(0, 0, 1.0, num_failed=1)]) == 4


# Starts a server with two models and loads a second version of each: minutes of CPU time.
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_versions_change_while_users_of_both_kinds_ask(tmp_path):
    options = DeploysOptions((0,), image_users=1, text_users=2, seconds=2.0, num_rounds=1)
    work = tmp_path / "work"
    work.mkdir()
    measured = bench.DeploysBench(Config(log_level="warning"), options, tmp_path, work)
    measured.measure()
    (found,) = measured.runs
    assert [phase.name for phase in found.phases] == [
        "before",
        *("images: loading", "images: after", "texts: loading", "texts: after"),
    ]
    assert num_failed(measured.runs) == 0
    assert all(each.num_ok for phase in found.phases for each in phase.by_kind.values())
