"""The summaries of runs with given records, compared with numpy."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_runs import CLOSED, record, run

from noria_bench.measurement.runs import ImageCheck, ResourceUsage, Traffic
from noria_bench.reports.run_summary import finite_ratio, summarise_run

LATENCIES = st.lists(st.floats(0.001, 900.0), min_size=1, max_size=60)


def test_percentiles_of_known_data_are_the_known_ones():
    found = summarise_run(run(records=[record(k, (k + 1) / 100) for k in range(101)]))  # 10, 20, … 1010 ms
    assert (found.p50_ms, found.p90_ms, found.p95_ms, found.p99_ms) == pytest.approx((510, 910, 960, 1000))
    assert found.avg_ms == pytest.approx(510)


@settings(deadline=None)  # the machine may be busy
@given(LATENCIES, st.integers(1, 3))
def test_rates_count_requests_that_ended_while_the_traffic_lasted(latencies_s, images):
    found = summarise_run(
        run(records=[record(k, s, start_s=0.0, num_images=images) for k, s in enumerate(latencies_s)])
    )
    within = int((np.array(latencies_s) <= CLOSED.seconds).sum())
    assert found.requests_per_s == pytest.approx(within / CLOSED.seconds)
    assert found.images_per_s == pytest.approx(images * within / CLOSED.seconds)
    assert found.num_requests == len(latencies_s)


def test_latency_counts_from_the_intended_start_and_the_client_s_delay_is_reported():
    records = [record(k, 2.0, late_s=0.5) for k in range(10)]
    found = summarise_run(run(records=records, traffic=Traffic("open", 10.0, "mixed", arrivals="poisson")))
    assert found.p50_ms == pytest.approx(2000)
    assert found.sent_late_p99_ms == pytest.approx(500)


def test_kinds_of_failures_are_distinguished_and_have_infinite_latency():
    records = [*(record(k) for k in range(7)), record(7, status=503), record(8, answered=False), record(9, status=0)]
    checks = (ImageCheck(0, None), ImageCheck(1, 12.0, "another image"))
    found = summarise_run(run(records=records, image_checks=checks))
    assert (found.num_http_failures, found.num_unanswered, found.num_wrong, found.num_failures) == (1, 2, 1, 4)
    assert found.num_compared == 2
    assert math.isfinite(found.p50_ms) and math.isinf(found.p90_ms)
    assert found.avg_ms == pytest.approx(1000)
    assert found.requests_per_s == pytest.approx(7 / CLOSED.seconds)


def test_a_run_without_successes_has_no_average_and_infinite_percentiles():
    found = summarise_run(run(records=[record(k, status=500) for k in range(5)]))
    assert (found.requests_per_s, found.num_http_failures) == (0.0, 5)
    assert math.isnan(found.avg_ms) and math.isinf(found.p50_ms)


def test_rates_of_an_interrupted_run_are_over_its_actual_duration():
    found = summarise_run(run(records=[record(k, 0.5, start_s=k / 2) for k in range(8)], complete=False))
    assert found.seconds == pytest.approx(4.0)  # the last is done half a second after 3.5
    assert found.requests_per_s == pytest.approx(2.0)


def test_resources_are_averaged_and_memory_is_the_maximum():
    usage = ResourceUsage((0.0, 1.0), (1.0, 2.0), (100, 300), (0.5, 0.7), (10, 30), energy_j=50.0, other_cpu_share=0.1)
    found = summarise_run(
        run(records=[record(k, num_images=2, batch_size=None if k else 6) for k in range(5)], usage=usage)
    )
    assert (found.cpu_cores, found.max_resident_bytes, found.gpu_utilisation, found.gpu_bytes) == pytest.approx(
        (1.5, 300, 0.6, 20)
    )
    assert found.energy_per_image_j == pytest.approx(5.0)
    assert found.mean_batch == 6
    assert found.other_cpu_share == 0.1


def test_what_was_not_measured_is_nan():
    found = summarise_run(run(records=[record(0, batch_size=None)], traffic=CLOSED))
    names = ("cpu_cores", "max_resident_bytes", "gpu_utilisation", "gpu_bytes", "energy_per_image_j", "mean_batch")
    assert all(math.isnan(getattr(found, name)) for name in (*names, "sent_late_p99_ms"))
    empty = summarise_run(run(records=[]))
    assert (empty.num_requests, empty.num_failures, empty.requests_per_s) == (0, 0, 0.0)
    assert math.isnan(empty.p50_ms)
    assert math.isnan(summarise_run(run(records=[], complete=False)).requests_per_s)


@pytest.mark.parametrize(
    ("part", "whole"), [(1.0, 0.0), (math.inf, 1.0), (1.0, math.inf), (math.nan, 1.0), (1.0, math.nan)]
)
def test_a_ratio_with_zero_or_infinity_is_nan(part, whole):
    assert math.isnan(finite_ratio(part, whole))
