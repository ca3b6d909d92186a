"""The article's figures agree with one another, as far as they are rounded."""

import pytest

from noria.bench.reports import article

ROWS = [
    *article.SCENARIOS["scenario1"].values(),
    *article.SCENARIOS["scenario2"].values(),
    *article.ATTENTION.values(),
    *article.CHANNELS_LAST.values(),
    *article.BATCHING.values(),
]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row.requests))
def test_rates_are_requests_over_the_time_as_printed(row):
    # One digit after the point; runs were up to a twentieth shorter than 15 minutes.
    assert row.requests_per_s == pytest.approx(row.requests / article.SECONDS, abs=0.12)
    assert row.p50_ms <= row.p90_ms <= row.p95_ms <= row.p99_ms


def test_the_rows_that_can_be_told_are_those_that_stand_elsewhere_too():
    first, *_, last = article.ATTENTION.values()
    assert first == article.SCENARIOS["scenario2"]["seed-batched"]
    assert (last.requests, last.p99_ms) == (article.BATCHING[500, 8].requests, article.BATCHING[500, 8].p99_ms)


def test_sweeps_are_known_by_their_names():
    assert article.of_sweep("attention") is article.ATTENTION
    assert list(article.of_sweep("channels-last"))[-1] == "channels last"
    assert article.of_sweep("batching")["250 ms, 8"] == article.BATCHING[250, 8]
    assert article.of_sweep("slots") == {}
    assert article.of_scenario("mixed") == {}
