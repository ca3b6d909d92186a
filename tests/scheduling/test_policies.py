"""Who goes first, by example; that nobody starves is held in virtual time by `test_virtual_time.py`."""

import pytest

from noria.scheduling.policies import POLICIES, Candidate, fcfs, least_slack, shortest_first


def candidate(arrived_at=0.0, deadline=None, priority="normal", remaining_s=10.0, min_remaining_s=5.0):
    return Candidate(arrived_at, deadline, priority, remaining_s, min_remaining_s)


def first(policy, now, **candidates):
    return min(candidates, key=lambda name: policy(candidates[name], now))


def test_of_two_deadlines_the_earlier_goes_first_whatever_the_work():
    long, short = candidate(deadline=30.0, remaining_s=25.0), candidate(deadline=20.0, remaining_s=1.0)
    assert first(least_slack, 0.0, long=long, short=short) == "short"


def test_a_high_priority_is_worth_half_a_minute_and_a_low_one_costs_it():
    urgent = {"high": 59.0, "normal": 30.0, "low": 1.0}
    keys = [
        least_slack(candidate(deadline=deadline, priority=name, min_remaining_s=0.1), 0.0)
        for name, deadline in urgent.items()
    ]
    assert keys == pytest.approx([29.0, 30.0, 31.0])


@pytest.mark.parametrize(("priority", "patience_s"), [("high", 5.0), ("normal", 60.0), ("low", 600.0)])
def test_without_a_deadline_it_is_due_when_its_patience_ends(priority, patience_s):
    patient = candidate(arrived_at=100.0, priority=priority)
    punctual = candidate(arrived_at=100.0, deadline=100.0 + patience_s, min_remaining_s=1.0)
    assert least_slack(patient, 101.0) == least_slack(punctual, 101.0)


def test_what_cannot_be_in_time_any_more_goes_behind_an_hour_of_waiting():
    late = candidate(deadline=4.0, min_remaining_s=5.0)
    assert first(least_slack, 0.0, late=late, low=candidate(priority="low")) == "low"


def test_what_is_late_by_less_than_costs_are_known_may_still_be_in_time():
    close = candidate(deadline=4.5, min_remaining_s=5.0)
    assert first(least_slack, 0.0, close=close, other=candidate(deadline=10.0)) == "close"


def test_first_come_is_first_served_whatever_was_asked_for():
    early, urgent = candidate(arrived_at=1.0, priority="low"), candidate(arrived_at=2.0, deadline=3.0, priority="high")
    assert first(fcfs, 2.0, early=early, urgent=urgent) == "early"


def test_least_work_goes_first_until_the_other_has_waited_twice_the_difference():
    short, long = candidate(arrived_at=10.0, remaining_s=4.0), candidate(arrived_at=0.0, remaining_s=10.0)
    assert first(shortest_first, 10.0, short=short, long=long) == "short"
    later = candidate(arrived_at=12.1, remaining_s=4.0)
    assert first(shortest_first, 12.1, later=later, long=long) == "long"


@pytest.mark.parametrize("policy", POLICIES.values(), ids=list(POLICIES))
def test_while_both_wait_nobody_overtakes(policy):
    """So the order that a forecast sees now is the order that will be."""
    one, other = candidate(arrived_at=0.0, deadline=500.0), candidate(arrived_at=7.0, remaining_s=3.0, priority="low")
    apart = [policy(one, now) - policy(other, now) for now in (10.0, 50.0, 400.0)]
    assert apart == pytest.approx([apart[0]] * 3)
