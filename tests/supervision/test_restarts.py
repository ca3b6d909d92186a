"""Restart decisions, in virtual time."""

import pytest

from noria.supervision.restarts import GiveUp, Restarts, StartAgain


def test_delays_of_a_child_that_no_longer_gets_ready_double_from_half_a_second_to_thirty():
    restarts, now, delays = Restarts(was_ever_ready=True), 0.0, []
    for _ in range(10):
        restarts.started(now)
        now += 100
        decision = restarts.ended(-9, now)
        assert isinstance(decision, StartAgain)
        delays.append(decision.delay_s)
        now += decision.delay_s
    assert delays == [0, 0.5, 1, 2, 4, 8, 16, 30, 30, 30]


def test_who_was_ready_in_the_life_that_ended_starts_again_at_once():
    restarts, now = Restarts(), 0.0
    for _ in range(5):
        restarts.started(now)
        restarts.ready()
        now += 0.1
        assert restarts.ended(-11, now) == StartAgain(0.0)
    restarts.started(now)
    assert restarts.ended(-11, now + 1) == StartAgain(0.5)  # before it was ready again
    restarts.started(now)
    restarts.ready()
    assert restarts.ended(-11, now + 2) == StartAgain(0.0)


def test_a_child_that_says_nothing_has_served_after_some_seconds():
    restarts = Restarts(serves_after_s=3.0)
    restarts.started(0.0)
    restarts.ended(-9, 1.0)
    restarts.started(1.0)
    assert restarts.ended(-9, 3.9) == StartAgain(0.5)
    restarts.started(10.0)
    assert restarts.ended(-9, 13.0) == StartAgain(0.0)


def test_who_is_killed_from_outside_again_and_again_starts_again_at_once():
    restarts = Restarts()
    restarts.started(0.0)
    restarts.ready()
    for now in (1.0, 2.0, 3.0, 4.0):
        assert restarts.ended(-9, now, killed=True) == StartAgain(0.0)
        restarts.started(now)
    assert restarts.ended(-11, 5.0) == StartAgain(0.0)  # the first end of its own
    assert restarts.ended(-11, 6.0) == StartAgain(0.5)


def test_who_is_killed_before_it_was_ever_ready_is_given_up_like_any_other():
    restarts = Restarts(num_ends=2)
    assert isinstance(restarts.ended(-9, 1.0, killed=True), GiveUp)


def test_three_ends_before_it_was_ever_ready_are_enough():
    restarts = Restarts()
    assert isinstance(restarts.ended(1, 1), StartAgain)
    assert isinstance(restarts.ended(1, 2), StartAgain)
    assert restarts.ended(7, 3) == GiveUp(7, "it ended 3 times before it was ready")


@pytest.mark.parametrize("status", [0, -11])
def test_giving_up_is_never_a_success(status):
    restarts = Restarts(num_ends=2)
    decision = restarts.ended(status, 1)
    assert isinstance(decision, GiveUp)
    assert decision.exit_status == 1


@pytest.mark.parametrize(("status", "what"), [(2, "config"), (3, "model")])
def test_a_refusal_is_final_only_before_it_was_ever_ready(status, what):
    restarts = Restarts()
    assert restarts.ended(status, 0) == GiveUp(status, f"it refused its {what}")
    restarts.ready()
    assert restarts.ended(status, 1000) == StartAgain(0.0)
    restarts.started(1000)
    assert restarts.ended(status, 1001) == StartAgain(0.5)
