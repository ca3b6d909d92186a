"""The last minute of a wheel, against numpy over everything that happened."""

import random

import numpy as np
import pytest

from noria.engine.rates import WINDOW_S, Rates


def test_rates_are_those_of_the_last_minute():
    draw, rates, now = random.Random(3), Rates(num_slots=8, now=0.5), 0.5
    turns, images, requests = [], [], []
    while now < 200:
        seconds, seated = draw.uniform(0.01, 0.3), draw.randrange(1, 9)
        stepped = draw.randrange(seated + 1)
        now += seconds + draw.uniform(0.0, 0.1)
        rates.turned(seconds, seated, stepped, now)
        turns.append((now, seconds, seated, stepped))
        if draw.random() < 0.3:
            rates.drew(now)
            images.append(now)
        if draw.random() < 0.2:
            took_s = draw.expovariate(1.0)
            rates.served(took_s, now)
            requests.append((now, took_s))
    view, first = rates.view(now), int(now) - WINDOW_S + 1
    window_s = now - first
    assert WINDOW_S - 1 <= window_s == view.window_s <= WINDOW_S
    recent = np.array([turn for turn in turns if turn[0] >= first])
    took_s = [took_s for at, took_s in requests if at >= first]
    assert view.requests_per_s == pytest.approx(len(took_s) / window_s)
    assert (view.p50_s, view.p95_s, view.p99_s) == pytest.approx(tuple(np.percentile(took_s, (50, 95, 99))))
    assert view.images_per_s == pytest.approx(sum(at >= first for at in images) / window_s)
    assert view.steps_per_s == pytest.approx(recent[:, 3].sum() / window_s)
    assert view.mean_batch == pytest.approx(recent[recent[:, 3] > 0, 3].mean())
    assert view.busy == pytest.approx(recent[:, 1].sum() / window_s)
    assert view.occupancy == pytest.approx((recent[:, 1] * recent[:, 2]).sum() / window_s / 8)


def test_a_wheel_that_has_just_begun_is_rated_over_a_second_at_least():
    rates = Rates(num_slots=2, now=100.0)
    rates.turned(0.1, 1, 1, 100.2)
    assert rates.view(100.2).window_s == 1.0
    assert rates.view(110.0).window_s == 10.0
    assert rates.view(110.0).steps_per_s == pytest.approx(0.1)


def test_after_a_silent_minute_nothing_is_left_of_it():
    rates = Rates(num_slots=2, now=0.0)
    rates.turned(0.5, 2, 2, 1.0)
    rates.served(0.5, 1.0)
    assert rates.any(60.0)
    assert not rates.any(61.0)
    view = rates.view(61.0)
    assert (view.requests_per_s, view.steps_per_s, view.p50_s, view.busy, view.mean_batch) == (0, 0, None, 0, 0)


def test_a_second_of_many_requests_takes_bounded_memory():
    rates = Rates(num_slots=2, now=0.0)
    for _ in range(5000):
        rates.served(1.0, 0.5)
    assert rates.view(1.0).requests_per_s == 5000
    assert sum(len(second.requests_s) for second in rates._seconds) == 1000


def test_a_turn_longer_than_the_window_makes_nothing_more_than_full():
    rates = Rates(num_slots=2, now=0.0)
    rates.turned(90.0, 2, 2, 90.0)
    view = rates.view(90.0)
    assert (view.busy, view.occupancy) == (1.0, 1.0)
