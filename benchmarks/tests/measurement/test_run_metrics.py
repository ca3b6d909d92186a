"""The metrics, compared with numpy and with cases counted by hand."""

import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from noria_bench.measurement.run_metrics import (
    RequestRecord,
    attainment,
    goodput,
    percentile,
    prediction_errors,
    share_within,
)


def record(done_s, *, status=200, deadline_s=2.0, intended_s=0.0, sent_s=0.0, predicted_s=None, num_images=1):
    return RequestRecord(
        0, intended_s, sent_s, done_s, status, deadline_s, "normal", 40.0, num_images, predicted_s=predicted_s
    )


@settings(deadline=None)  # the machine may be busy
@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50), st.floats(0, 1))
def test_percentiles_are_numpys(values, share):
    assert percentile(values, share) == pytest.approx(float(np.quantile(values, share)), rel=1e-9, abs=1e-9)


def test_a_percentile_without_values_is_nan_and_one_among_failures_is_infinite():
    assert math.isnan(percentile([], 0.5))
    assert percentile([1.0, math.inf, math.inf], 0.9) == math.inf
    assert percentile([1.0, 2.0, math.inf], 0.5) == 2.0


def test_rejected_broken_late_and_unanswered_requests_miss_their_deadline():
    records = [
        record(1.9),
        record(2.1),  # late
        record(0.1, status=429),
        record(0.1, status=504),
        record(0.1, status=0),
        record(None, status=0),
    ]
    assert [r.met_deadline for r in records] == [True, False, False, False, False, False]
    assert attainment(records) == pytest.approx(1 / 6)
    assert math.isnan(attainment([]))


def test_latency_counts_from_the_intended_start():
    assert not record(4.5, intended_s=1.0, sent_s=4.0).met_deadline
    assert record(4.5, intended_s=1.0, sent_s=4.0).latency_s == 3.5


def test_goodput_counts_what_ends_in_the_window_and_in_time():
    records = [record(done) for done in (0.5, 1.0, 1.9)] + [record(3.0, intended_s=2.0, num_images=4), record(2.5)]
    assert goodput(records, 1.0, 4.0) == pytest.approx(3 / 3)
    assert goodput(records, 1.0, 4.0, lambda r: r.num_images) == pytest.approx(6 / 3)


def test_prediction_errors_are_of_answered_requests_with_a_prediction():
    records = [
        record(1.1, predicted_s=1.0),
        record(1.8, sent_s=0.8, predicted_s=2.0),
        record(1.0),
        record(1.0, status=429, predicted_s=1.0),
    ]
    errors = prediction_errors(records)
    assert errors == pytest.approx([0.1, -0.5])
    assert share_within(errors, 0.15) == 0.5
    assert math.isnan(share_within([], 0.15))
