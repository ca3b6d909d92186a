"""The article's results are consistent within their rounding."""

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


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row.num_requests))
def test_rates_are_requests_over_the_time_as_printed(row):
    # one digit after the point
    assert row.requests_per_s == pytest.approx(row.num_requests / reference_results.SECONDS, abs=0.05)
    assert row.p50_ms <= row.p90_ms <= row.p95_ms <= row.p99_ms


def test_the_first_and_last_rows_of_the_ablation_are_in_other_tables_too():
    best = reference_results.ATTENTION["memory-efficient"]
    assert (
        reference_results.ATTENTION["memory-efficient, sliced"]
        == reference_results.SCENARIOS["scenario2"]["reference-batched"]
    )
    assert (best.num_requests, best.p99_ms) == (
        reference_results.BATCHING[500, 8].num_requests,
        reference_results.BATCHING[500, 8].p99_ms,
    )
    assert best.num_requests == max(row.num_requests for row in reference_results.ATTENTION.values())


def test_sweeps_are_found_by_name():
    assert reference_results.sweep_rows("attention") is reference_results.ATTENTION
    assert reference_results.sweep_rows("channels-last")["on"].num_requests == 1316
    assert reference_results.sweep_rows("batching")["250 ms, 8"] == reference_results.BATCHING[250, 8]
    assert reference_results.sweep_rows("slots") == {}


@pytest.mark.parametrize("sweep", ["attention", "channels-last", "batching"])
def test_every_variant_of_the_reference_server_has_a_row_of_the_article(sweep):
    ours = {variant.name for variant in variants(sweep, full=False) if variant.target == "reference-batched"}
    assert ours <= set(reference_results.sweep_rows(sweep))


def test_a_scenario_that_the_article_lacks_has_no_rows():
    assert reference_results.scenario_rows("mixed") == {}
