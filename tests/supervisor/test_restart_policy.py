"""Restart decisions, in virtual time."""

import pytest

from noria.supervisor.restart_policy import GiveUp, Restart, RestartPolicy


def test_delays_double_from_half_a_second_to_thirty_while_a_child_does_not_become_ready():
    policy, now, delays = RestartPolicy(was_ever_ready=True), 0.0, []
    for _ in range(10):
        policy.started(now)
        now += 100
        decision = policy.ended(-9, now)
        assert isinstance(decision, Restart)
        delays.append(decision.delay_s)
        now += decision.delay_s
    assert delays == [0, 0.5, 1, 2, 4, 8, 16, 30, 30, 30]


def test_a_child_that_was_ready_in_its_last_run_restarts_at_once():
    policy, now = RestartPolicy(), 0.0
    for _ in range(5):
        policy.started(now)
        policy.ready()
        now += 0.1
        assert policy.ended(-11, now) == Restart(0.0)
    policy.started(now)
    assert policy.ended(-11, now + 1) == Restart(0.5)  # before it was ready again
    policy.started(now)
    policy.ready()
    assert policy.ended(-11, now + 2) == Restart(0.0)


def test_a_child_that_does_not_report_readiness_counts_as_ready_after_some_seconds():
    policy = RestartPolicy(assumed_ready_after_s=3.0)
    policy.started(0.0)
    policy.ended(-9, 1.0)
    policy.started(1.0)
    assert policy.ended(-9, 3.9) == Restart(0.5)
    policy.started(10.0)
    assert policy.ended(-9, 13.0) == Restart(0.0)


def test_a_child_that_is_killed_from_outside_repeatedly_restarts_at_once():
    policy = RestartPolicy()
    policy.started(0.0)
    policy.ready()
    for now in (1.0, 2.0, 3.0, 4.0):
        assert policy.ended(-9, now, killed=True) == Restart(0.0)
        policy.started(now)
    assert policy.ended(-11, 5.0) == Restart(0.0)  # the first end that is not a kill
    assert policy.ended(-11, 6.0) == Restart(0.5)


def test_a_child_that_is_killed_before_it_was_ever_ready_is_given_up_like_any_other():
    policy = RestartPolicy(num_failed_runs=2)
    assert isinstance(policy.ended(-9, 1.0, killed=True), GiveUp)


def test_three_ends_before_it_was_ever_ready_are_enough():
    policy = RestartPolicy()
    assert isinstance(policy.ended(1, 1), Restart)
    assert isinstance(policy.ended(1, 2), Restart)
    assert policy.ended(7, 3) == GiveUp(7, "it ended 3 times before it was ready")


@pytest.mark.parametrize("status", [0, -11])
def test_giving_up_is_never_a_success(status):
    policy = RestartPolicy(num_failed_runs=2)
    decision = policy.ended(status, 1)
    assert isinstance(decision, GiveUp)
    assert decision.exit_status == 1


@pytest.mark.parametrize(
    ("status", "reason"),
    [(2, "it rejected its config"), (3, "it rejected its model"), (75, "what it needs is not there now")],
)
def test_what_another_start_would_not_mend_is_final_only_before_the_child_was_ever_ready(status, reason):
    policy = RestartPolicy(assumed_ready_after_s=3.0)
    policy.started(0)
    assert policy.ended(status, 60) == GiveUp(status, reason)  # a busy machine takes long to find out
    policy.ready()
    assert policy.ended(status, 1000) == Restart(0.0)
    policy.started(1000)
    assert policy.ended(status, 1001) == Restart(0.5)
