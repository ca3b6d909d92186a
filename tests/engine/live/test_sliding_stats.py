"""Statistics over the last minute, compared with numpy over all events."""

import random

import numpy as np
import pytest

from noria.engine.live.sliding_stats import WINDOW_S, SlidingStats


def test_rates_are_those_of_the_last_minute():
    rng, stats, now = random.Random(3), SlidingStats(num_slots=8, now=0.5), 0.5
    iterations, images, requests = [], [], []
    while now < 200:
        seconds, num_running = rng.uniform(0.01, 0.3), rng.randrange(1, 9)
        stepped = rng.randrange(num_running + 1)
        now += seconds + rng.uniform(0.0, 0.1)
        stats.add_iteration(seconds, num_running, stepped, {}, now)
        iterations.append((now, seconds, num_running, stepped))
        if rng.random() < 0.3:
            stats.add_image(now)
            images.append(now)
        if rng.random() < 0.2:
            took_s = rng.expovariate(1.0)
            stats.add_request(took_s, now)
            requests.append((now, took_s))
    view, first = stats.view(now), int(now) - WINDOW_S + 1
    window_s = now - first
    assert WINDOW_S - 1 <= window_s == view.window_s <= WINDOW_S
    recent = np.array([iteration for iteration in iterations if iteration[0] >= first])
    took_s = [took_s for at, took_s in requests if at >= first]
    assert view.requests_per_s == pytest.approx(len(took_s) / window_s)
    assert (view.p50_s, view.p95_s, view.p99_s) == pytest.approx(tuple(np.percentile(took_s, (50, 95, 99))))
    assert view.images_per_s == pytest.approx(sum(at >= first for at in images) / window_s)
    assert view.steps_per_s == pytest.approx(recent[:, 3].sum() / window_s)
    assert view.mean_batch == pytest.approx(recent[recent[:, 3] > 0, 3].mean())
    assert view.busy == pytest.approx(recent[:, 1].sum() / window_s)
    assert view.occupancy == pytest.approx((recent[:, 1] * recent[:, 2]).sum() / window_s / 8)


def test_rates_shortly_after_the_start_are_over_at_least_a_second():
    stats = SlidingStats(num_slots=2, now=100.0)
    stats.add_iteration(0.1, 1, 1, {}, 100.2)
    assert stats.view(100.2).window_s == 1.0
    assert stats.view(110.0).window_s == 10.0
    assert stats.view(110.0).steps_per_s == pytest.approx(0.1)


def test_after_an_idle_minute_all_rates_are_zero():
    stats = SlidingStats(num_slots=2, now=0.0)
    stats.add_iteration(0.5, 2, 2, {}, 1.0)
    stats.add_request(0.5, 1.0)
    assert stats.has_recent(60.0)
    assert not stats.has_recent(61.0)
    view = stats.view(61.0)
    assert (view.requests_per_s, view.steps_per_s, view.p50_s, view.busy, view.mean_batch) == (0, 0, None, 0, 0)


def test_a_second_of_many_requests_takes_bounded_memory():
    stats = SlidingStats(num_slots=2, now=0.0)
    for _ in range(5000):
        stats.add_request(1.0, 0.5)
    assert stats.view(1.0).requests_per_s == 5000
    assert sum(len(second.latencies_s) for second in stats._buckets) == 1000


def test_an_iteration_longer_than_the_window_gives_at_most_full_shares():
    stats = SlidingStats(num_slots=2, now=0.0)
    stats.add_iteration(90.0, 2, 2, {}, 90.0)
    view = stats.view(90.0)
    assert (view.busy, view.occupancy) == (1.0, 1.0)


def test_the_time_of_an_iteration_is_divided_among_clients_and_forgotten_after_a_minute():
    stats = SlidingStats(num_slots=4, now=0.0)
    stats.add_iteration(9.0, 4, 4, {("alice", "alice"): 4}, 9.0)
    stats.add_iteration(0.5, 4, 4, {("alice", "alice"): 3, ("alice", "alice jobs"): 1}, 30.0)
    stats.add_iteration(0.5, 1, 1, {("", "~1"): 1}, 31.0)
    assert stats.shares(72.0) == pytest.approx({"alice": 0.375, "alice jobs": 0.125, "~1": 0.5})
    assert stats.shares(95.0) == {}


def test_a_second_of_many_clients_takes_bounded_memory():
    stats = SlidingStats(num_slots=2, now=0.0)
    for number in range(400):
        stats.add_iteration(0.001, 1, 1, {("", f"~{number}"): 1}, 0.5)
    assert len(stats.shares(1.0)) <= 101
    assert stats.shares(1.0)[""] == pytest.approx(0.75)
