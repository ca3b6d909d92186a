"""Examples of each policy's order; `test_virtual_time.py` checks in virtual time that no request starves."""

import pytest

from noria.scheduling.policies import POLICIES, Candidate, fcfs, least_slack, shortest_first


def candidate(arrived_at=0.0, deadline=None, priority="normal", remaining_s=10.0, min_remaining_s=5.0):
    return Candidate(arrived_at, deadline, priority, remaining_s, min_remaining_s)


def first(policy, now, **candidates):
    return min(candidates, key=lambda name: policy(candidates[name], now))


def test_the_earlier_deadline_goes_first_whatever_the_work():
    long, short = candidate(deadline=30.0, remaining_s=25.0), candidate(deadline=20.0, remaining_s=1.0)
    assert first(least_slack, 0.0, long=long, short=short) == "short"


def test_high_priority_gains_half_a_minute_and_low_priority_loses_it():
    urgent = {"high": 59.0, "normal": 30.0, "low": 1.0}
    keys = [
        least_slack(candidate(deadline=deadline, priority=name, min_remaining_s=0.1), 0.0)
        for name, deadline in urgent.items()
    ]
    assert keys == pytest.approx([29.0, 30.0, 31.0])


@pytest.mark.parametrize(("priority", "implicit_deadline_s"), [("high", 5.0), ("normal", 60.0), ("low", 600.0)])
def test_an_image_without_a_deadline_has_an_implicit_one(priority, implicit_deadline_s):
    without_deadline = candidate(arrived_at=100.0, priority=priority)
    with_deadline = candidate(arrived_at=100.0, deadline=100.0 + implicit_deadline_s, min_remaining_s=1.0)
    assert least_slack(without_deadline, 101.0) == least_slack(with_deadline, 101.0)


def test_an_image_that_cannot_meet_its_deadline_goes_behind_an_hour_of_waiting():
    late = candidate(deadline=4.0, min_remaining_s=5.0)
    assert first(least_slack, 0.0, late=late, low=candidate(priority="low")) == "low"


def test_an_image_late_by_less_than_the_cost_uncertainty_keeps_its_rank():
    close = candidate(deadline=4.5, min_remaining_s=5.0)
    assert first(least_slack, 0.0, close=close, other=candidate(deadline=10.0)) == "close"


def test_fcfs_ignores_deadlines_and_priorities():
    early, urgent = candidate(arrived_at=1.0, priority="low"), candidate(arrived_at=2.0, deadline=3.0, priority="high")
    assert first(fcfs, 2.0, early=early, urgent=urgent) == "early"


def test_shortest_first_ranks_by_work_until_the_other_has_waited_twice_the_difference():
    short, long = candidate(arrived_at=10.0, remaining_s=4.0), candidate(arrived_at=0.0, remaining_s=10.0)
    assert first(shortest_first, 10.0, short=short, long=long) == "short"
    later = candidate(arrived_at=12.1, remaining_s=4.0)
    assert first(shortest_first, 12.1, later=later, long=long) == "long"


@pytest.mark.parametrize("policy", POLICIES.values(), ids=list(POLICIES))
def test_the_order_of_waiting_images_does_not_change_with_time(policy):
    """Forecasts rely on it."""
    one, other = candidate(arrived_at=0.0, deadline=500.0), candidate(arrived_at=7.0, remaining_s=3.0, priority="low")
    differences = [policy(one, now) - policy(other, now) for now in (10.0, 50.0, 400.0)]
    assert differences == pytest.approx([differences[0]] * 3)
