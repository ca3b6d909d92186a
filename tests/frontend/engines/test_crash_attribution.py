"""How the loss of an attempt counts, and which requests are retried."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.frontend.engines.crash_attribution import AttemptHistory, ExitReport


@pytest.mark.parametrize(
    ("exit_cause", "in_flight", "loss_cause"),
    [
        ("crashed", True, "suspected"),
        ("crashed", False, "not_at_fault"),
        ("killed", True, "not_at_fault"),
        ("killed", False, "not_started"),
        ("none", True, "suspected"),
        ("none", False, "suspected"),
    ],
)
def test_the_loss_cause_follows_from_the_exit_and_what_was_in_flight(exit_cause, in_flight, loss_cause):
    report = ExitReport(exit_cause, frozenset({"a.1"} if in_flight else {"b.2"}))
    assert report.loss_cause("a.1") == loss_cause


def after(*causes):
    history = AttemptHistory()
    for cause in causes:
        history = history.with_loss(cause)
    return history


def test_the_first_crash_makes_a_request_exclusive_and_the_second_fails_it():
    once = after("suspected")
    assert once.needs_exclusive
    assert not once.crashes_engines
    assert once.with_loss("suspected").crashes_engines


def test_kills_do_not_count_as_crashes_of_a_suspected_request():
    history = after("suspected", *["not_at_fault"] * 9)
    assert not history.crashes_engines
    assert not history.retries_exhausted
    assert history.with_loss("not_at_fault").retries_exhausted


def test_three_kills_make_a_request_exclusive_and_ten_more_fail_it():
    history = AttemptHistory()
    for _ in range(3):
        assert not history.needs_exclusive
        history = history.with_loss("not_at_fault")
    assert history.needs_exclusive
    for _ in range(10):
        assert not history.retries_exhausted
        history = history.with_loss("not_at_fault")
    assert history.retries_exhausted


def test_an_exclusive_crash_after_kills_is_the_first_crash():
    assert not after("not_at_fault", "not_at_fault", "not_at_fault", "suspected").crashes_engines


@given(st.lists(st.sampled_from(["suspected", "not_at_fault", "not_started"]), max_size=40))
def test_no_request_is_found_to_crash_engines_without_an_exclusive_crash(causes):
    history, crashed_exclusively = AttemptHistory(), False
    for cause in causes:
        crashed_exclusively |= cause == "suspected" and history.needs_exclusive
        history = history.with_loss(cause)
    assert not history.crashes_engines or crashed_exclusively
    assert history.num_crashes == causes.count("suspected")


@given(st.lists(st.sampled_from(["suspected", "not_at_fault"]), min_size=14, max_size=14))
def test_a_request_in_flight_at_fourteen_exits_fails(causes):
    history = after(*causes)
    assert history.crashes_engines or history.retries_exhausted
