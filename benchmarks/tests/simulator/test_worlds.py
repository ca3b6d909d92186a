"""The exact engine by example, and the fast one against it."""

import math
import random

import numpy as np
import pytest

from noria.scheduling.cluster.autoscaler import AutoscalerSettings, BacklogAutoscaler
from noria_bench.simulator.devices import EXAMPLE
from noria_bench.simulator.fast import arrival_times, simulate_fast
from noria_bench.simulator.study import Scenario, Study, Traffic, choose_engine, fewest
from noria_bench.simulator.workload import Arrival, Shape, SimulateError, make_arrivals
from noria_bench.simulator.world import Settings, simulate

COSTS = EXAMPLE.costs()
KEY = next(iter(COSTS.steps))


def arrivals_at(*times_s, **fields):
    return [Arrival(at_s, "", 512, 512, 20, **fields) for at_s in times_s]


def test_a_request_alone_takes_what_its_calls_cost():
    outcome = simulate(Settings(EXAMPLE, 1), arrivals_at(1.0))
    expected_s = 20 * COSTS.step_s(KEY, 2) + COSTS.decode_s(KEY) + EXAMPLE.text_encode_s
    assert list(outcome.latencies_s) == [pytest.approx(expected_s)]


def test_requests_go_to_the_device_with_the_least_work():
    outcome = simulate(Settings(EXAMPLE, 2), arrivals_at(1.0, 1.1))
    assert outcome.latencies_s[0] == pytest.approx(outcome.latencies_s[1])


def test_requests_of_a_lost_device_start_again_and_each_ends_once():
    means_s = {"mean_time_to_failure_s": 60.0, "mean_time_to_interruption_s": 60.0}
    settings = Settings(EXAMPLE, 4, queue_limit=10**6, notice_s=5.0, **means_s)
    arrivals = list(make_arrivals("poisson", 3.0, [Shape()], 150.0, 1))
    outcome = simulate(settings, arrivals)
    assert outcome.num_requests == len(arrivals) == len(outcome.latencies_s)
    assert min(outcome.num_failures, outcome.num_interruptions, outcome.num_restarted) > 0


def test_the_autoscaler_adds_devices_after_their_cold_start():
    bounds = AutoscalerSettings(1, 6, target_backlog_s=2.0, scale_down_after_s=60.0)
    arrivals = list(make_arrivals("poisson", 6.0, [Shape()], 150.0, 1))
    fixed = simulate(Settings(EXAMPLE, 1, queue_limit=10**6), arrivals)
    scaled = simulate(Settings(EXAMPLE, 1, queue_limit=10**6, autoscaler=BacklogAutoscaler(bounds)), arrivals)
    assert scaled.quantile_s(0.9) < 0.7 * fixed.quantile_s(0.9)
    assert scaled.device_s > fixed.device_s


def test_deadlines_that_cannot_be_met_are_rejected_as_by_the_server():
    outcome = simulate(Settings(EXAMPLE, 1), arrivals_at(*([1.0] * 20), deadline_s=1.5))
    assert outcome.unserved.total() > 0
    assert outcome.quantile_s(1.0) <= 1.5
    assert outcome.num_requests == 20


@pytest.mark.slow  # numba compiles for 15 s
@pytest.mark.parametrize(("rate", "num_devices"), [(1.0, 1), (4.5, 2), (9.0, 4)])
def test_the_fast_engine_is_within_a_few_percent_of_the_exact_one(rate, num_devices):
    """Both see the same requests of one size, mixed steps and rows, at 40, 90 and 90 % of what the devices can do."""
    pytest.importorskip("numba")
    shapes = [Shape(share=0.6), Shape(share=0.4, steps=28, rows=1)]
    rng = random.Random(3)
    kinds = [int(rng.random() < 0.4) for _ in range(1200)]
    times_s = [0.0]
    while len(times_s) < len(kinds):
        times_s.append(times_s[-1] + rng.expovariate(rate))
    arrivals = [
        Arrival(at_s, "", 512, 512, shapes[kind].steps, rows=shapes[kind].rows)
        for at_s, kind in zip(times_s, kinds, strict=True)
    ]
    exact = simulate(Settings(EXAMPLE, num_devices), arrivals)
    near = simulate_fast(EXAMPLE, num_devices, np.array(times_s), shapes, np.array(kinds, dtype=np.uint8))
    assert near.num_requests == exact.num_requests
    for share in (0.5, 0.99):
        assert near.quantile_s(share) == pytest.approx(exact.quantile_s(share), rel=0.08)


@pytest.mark.slow  # as above
def test_the_fast_engine_rejects_when_queues_are_full():
    pytest.importorskip("numba")
    times_s = np.linspace(0.0, 1.0, 100)
    near = simulate_fast(EXAMPLE, 1, times_s, [Shape()], queue_limit=10)
    exact = simulate(Settings(EXAMPLE, 1, queue_limit=10), arrivals_at(*times_s))
    assert near.unserved == exact.unserved


def test_the_mean_of_each_process_is_the_rate():
    for kind in ("poisson", "bursty", "diurnal"):
        duration_s = 86_400.0
        num = sum(1 for _ in make_arrivals(kind, 0.2, [Shape()], duration_s, 2))
        assert num == pytest.approx(0.2 * duration_s, rel=0.06), kind
    times_s = arrival_times("diurnal", 2.0, 86_400.0, 1)
    assert len(times_s) == pytest.approx(2.0 * 86_400, rel=0.02)
    night, noon = np.sum(times_s < 3600), np.sum(np.abs(times_s - 43_200) < 1800)
    assert noon / night == pytest.approx(4.0, rel=0.1)


def test_bursty_arrivals_do_not_all_begin_with_a_burst():
    nums = [sum(1 for _ in make_arrivals("bursty", 4.0, [Shape()], 20.0, seed)) for seed in range(200)]
    assert sum(nums) / len(nums) == pytest.approx(4.0 * 20.0, rel=0.2)  # 3.6 times as many if they do


def test_the_fewest_devices_for_a_p99_are_found():
    assert [fewest(lambda num: num >= 37, first) for first in (1, 30, 37)] == [37, 37, 37]
    with pytest.raises(SimulateError, match="do not meet the target"):
        fewest(lambda _: False, 5)
    study = Study(Traffic(rate=4.0, duration_s=60.0), "exact")
    scenario = Scenario("", Settings(EXAMPLE, 1), 1.0)
    result = study.run(scenario, 1.0)
    assert result.tried[result.num_devices] >= 0.99 > result.tried.get(result.num_devices - 1, 0.0)


def test_the_fast_engine_refuses_what_it_does_not_know():
    scenario = Scenario("", Settings(EXAMPLE, 1, mean_time_to_failure_s=60.0), 1.0)
    large = Traffic(rate=1000.0, duration_s=1000.0)
    assert choose_engine("auto", scenario, large) == "exact"
    assert choose_engine("auto", Scenario("", Settings(EXAMPLE, 1), 1.0), large) == "fast"
    with pytest.raises(SimulateError, match="no failures"):
        choose_engine("fast", scenario, large)
    assert math.isinf(Settings(EXAMPLE, 1).mean_time_to_failure_s)
