"""The article's figures agree with one another, as far as they are rounded."""

import pytest

from noria_bench.benches.sweeps import variants
from noria_bench.reports import reference_results

ROWS = [
    *reference_results.SCENARIOS["scenario1"].values(),
    *reference_results.SCENARIOS["scenario2"].values(),
    *reference_results.ATTENTION.values(),
    *reference_results.CHANNELS_LAST.values(),
    *reference_results.BATCHING.values(),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row.requests))
def test_rates_are_requests_over_the_time_as_printed(row):
    assert row.requests_per_s == pytest.approx(
        row.requests / reference_results.SECONDS, abs=0.05
    )  # one digit after the point
    assert row.p50_ms <= row.p90_ms <= row.p95_ms <= row.p99_ms


def test_the_ablations_ends_are_rows_that_stand_elsewhere_too():
    best = reference_results.ATTENTION["memory-efficient"]
    assert (
        reference_results.ATTENTION["memory-efficient, sliced"]
        == reference_results.SCENARIOS["scenario2"]["seed-batched"]
    )
    assert (best.num_requests, best.p99_ms) == (
        reference_results.BATCHING[500, 8].num_requests,
        reference_results.BATCHING[500, 8].p99_ms,
    )
    assert best.num_requests == max(row.num_requests for row in reference_results.ATTENTION.values())


def test_sweeps_are_known_by_their_names():
    assert reference_results.sweep_rows("attention") is reference_results.ATTENTION
    assert reference_results.sweep_rows("channels-last")["on"].num_requests == 1316
    assert reference_results.sweep_rows("batching")["250 ms, 8"] == reference_results.BATCHING[250, 8]
    assert reference_results.sweep_rows("slots") == {}


@pytest.mark.parametrize("sweep", ["attention", "channels-last", "batching"])
def test_every_variant_that_is_run_on_the_articles_server_has_a_row_of_the_articles(sweep):
    ours = {variant.name for variant in variants(sweep, full=False) if variant.target == "seed-batched"}
    assert ours <= set(reference_results.sweep_rows(sweep))


def test_a_scenario_of_ours_alone_has_no_rows_of_the_articles():
    assert reference_results.scenario_rows("mixed") == {}
