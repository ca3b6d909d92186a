"""Who is blamed for an engine's end, and what follows."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.frontend.engines.crash_attribution import AttemptHistory, ExitReport


@pytest.mark.parametrize(
    ("end", "aboard", "blame"),
    [
        ("crashed", True, "suspected"),
        ("crashed", False, "excused"),
        ("killed", True, "excused"),
        ("killed", False, "forgotten"),
        ("none", True, "suspected"),
        ("none", False, "suspected"),
    ],
)
def test_blame_follows_from_how_the_engine_ended_and_who_was_aboard(end, aboard, blame):
    assert ExitReport(end, frozenset({"a.1"} if aboard else {"b.2"})).loss_cause("a.1") == blame


def after(*blames):
    losses = AttemptHistory()
    for blame in blames:
        losses = losses.with_loss(blame)
    return losses


def test_the_first_crash_makes_a_suspect_and_the_second_convicts():
    once = after("suspected")
    assert once.needs_exclusive
    assert not once.crashes_engines
    assert once.with_loss("suspected").crashes_engines


def test_a_suspect_whose_engine_is_killed_by_others_is_not_convicted():
    losses = after("suspected", *["excused"] * 9)
    assert not losses.crashes_engines
    assert not losses.retries_exhausted
    assert losses.with_loss("excused").retries_exhausted


def test_kills_lead_to_solitude_after_three_and_to_failure_after_ten_more():
    losses = AttemptHistory()
    for _ in range(3):
        assert not losses.needs_exclusive
        losses = losses.with_loss("excused")
    assert losses.needs_exclusive
    for _ in range(10):
        assert not losses.retries_exhausted
        losses = losses.with_loss("excused")
    assert losses.retries_exhausted


def test_a_crash_alone_after_kills_only_is_the_first_crash():
    assert not after("excused", "excused", "excused", "suspected").crashes_engines


@given(st.lists(st.sampled_from(["suspected", "excused", "forgotten"]), max_size=40))
def test_nobody_is_convicted_without_a_crash_alone(blames):
    losses, crashed_alone = AttemptHistory(), False
    for blame in blames:
        crashed_alone |= blame == "suspected" and losses.needs_exclusive
        losses = losses.with_loss(blame)
    assert not losses.crashes_engines or crashed_alone
    assert losses.num_crashes == blames.count("suspected")


@given(st.lists(st.sampled_from(["suspected", "excused"]), min_size=14, max_size=14))
def test_whoever_is_aboard_at_fourteen_ends_is_given_up(blames):
    losses = after(*blames)
    assert losses.crashes_engines or losses.retries_exhausted
