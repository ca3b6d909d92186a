"""The article's figures agree with one another, as far as they are rounded."""

import pytest

from noria.bench.reports import article
from noria.bench.sweeps import variants

ROWS = [
    *article.SCENARIOS["scenario1"].values(),
    *article.SCENARIOS["scenario2"].values(),
    *article.ATTENTION.values(),
    *article.CHANNELS_LAST.values(),
    *article.BATCHING.values(),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row.requests))
def test_rates_are_requests_over_the_time_as_printed(row):
    assert row.requests_per_s == pytest.approx(row.requests / article.SECONDS, abs=0.05)  # one digit after the point
    assert row.p50_ms <= row.p90_ms <= row.p95_ms <= row.p99_ms


def test_the_ablations_ends_are_rows_that_stand_elsewhere_too():
    best = article.ATTENTION["memory-efficient"]
    assert article.ATTENTION["memory-efficient, sliced"] == article.SCENARIOS["scenario2"]["seed-batched"]
    assert (best.num_requests, best.p99_ms) == (article.BATCHING[500, 8].num_requests, article.BATCHING[500, 8].p99_ms)
    assert best.num_requests == max(row.num_requests for row in article.ATTENTION.values())


def test_sweeps_are_known_by_their_names():
    assert article.sweep_rows("attention") is article.ATTENTION
    assert article.sweep_rows("channels-last")["on"].num_requests == 1316
    assert article.sweep_rows("batching")["250 ms, 8"] == article.BATCHING[250, 8]
    assert article.sweep_rows("slots") == {}


@pytest.mark.parametrize("sweep", ["attention", "channels-last", "batching"])
def test_every_variant_that_is_run_on_the_articles_server_has_a_row_of_the_articles(sweep):
    ours = {variant.name for variant in variants(sweep, full=False) if variant.target == "seed-batched"}
    assert ours <= set(article.sweep_rows(sweep))


def test_a_scenario_of_ours_alone_has_no_rows_of_the_articles():
    assert article.scenario_rows("mixed") == {}
