"""Shadows: their plans, what is known of them, and when they are over."""

import pytest

from noria.canary.shadow import (
    ShadowCounts,
    ShadowEnd,
    ShadowPlan,
    ShadowState,
    advance,
    describe,
    end_of,
    is_progress,
    parse_shadow,
)


@pytest.mark.parametrize(
    ("text", "plan"),
    [
        ("20%", ShadowPlan(20.0)),
        (" 0.5 ", ShadowPlan(0.5)),
        ("20% for 10m", ShadowPlan(20.0, max_s=600.0)),
        ("100 for 500", ShadowPlan(100.0, max_answers=500)),
    ],
)
def test_a_plan_is_per_cents_and_perhaps_an_end(text: str, plan: ShadowPlan) -> None:
    assert parse_shadow(text) == plan


@pytest.mark.parametrize(
    "text", ["", "x", "0%", "101%", "20% for", "20% for 1s", "20% for 40d", "20 for 0", "20 for 1.5", "1.2.3", "2" * 99]
)
def test_other_plans_are_rejected_with_the_allowed_ones(text: str) -> None:
    with pytest.raises(ValueError, match=r"allowed|a shadow"):
        parse_shadow(text)


def end(plan: ShadowPlan, state: ShadowState) -> ShadowEnd | None:
    return end_of(plan, state, 0.03)


def test_a_shadow_ends_after_its_answers_or_its_time_but_not_after_an_outage() -> None:
    state = advance(ShadowState(updated_at=100.0), ShadowCounts(num_answers=9), 105.0)
    assert end(ShadowPlan(20.0, max_answers=10), state) is None
    assert "for 9 answers; 9 copies answered" in end(ShadowPlan(20.0, max_answers=9), state).reason
    later = advance(state, ShadowCounts(), 999.0)  # 10 s of it count
    assert end(ShadowPlan(20.0, max_s=20.0), later) is None
    assert advance(later, ShadowCounts(), 990.0).elapsed_s == later.elapsed_s == 15.0  # a clock that was set back
    assert "for 20 s" in end(ShadowPlan(20.0, max_s=20.0), advance(later, ShadowCounts(), 1004.0)).reason
    assert end(ShadowPlan(20.0), advance(state, ShadowCounts(num_answers=10**6), 125.0)) is None


def test_a_shadow_whose_copies_end_engines_is_over_and_has_not_passed() -> None:
    state = ShadowState(ShadowCounts(num_answers=2, num_errors=2, num_lost=2))
    assert not end(ShadowPlan(20.0), state).has_passed
    assert "engines ended 2 times" in end(ShadowPlan(20.0), state).reason


@pytest.mark.parametrize(
    ("num_errors", "num_control_errors", "expected"),
    [(0, 0, True), (3, 0, True), (4, 0, False), (9, 6, True), (10, 6, False), (0, 50, True)],
)
def test_a_shadow_with_more_errors_than_allowed_has_not_passed(
    num_errors: int, num_control_errors: int, expected: bool
) -> None:
    counts = ShadowCounts(num_answers=100, num_errors=num_errors, num_control_errors=num_control_errors)
    found = end(ShadowPlan(20.0, max_answers=100), ShadowState(counts))
    assert (found.has_passed, "too many errors" in found.reason) == (expected, not expected)


def test_counts_are_added_and_the_largest_distance_is_kept() -> None:
    one = ShadowCounts(num_answers=1, num_timed=1, shadow_s=3.0, control_s=2.0, num_distances=1, distance=0.2)
    other = ShadowCounts(
        num_answers=1, num_errors=1, num_dropped=4, max_distance=0.5, num_distances=1, distance=0.5
    )  # fmt: skip
    assert describe(one + other) == (
        "2 copies answered, 4 dropped; errors 1, of the control 0; computing time 1.50 times the control's; "
        "distance of outputs 0.35 on average, 0.5 at most"
    )
    assert describe(ShadowCounts(num_dropped=3)) == "no copy was answered yet, 3 were dropped"


def test_a_state_is_worth_an_event_when_answers_or_time_have_doubled() -> None:
    def known(num_answers: int, elapsed_s: float) -> ShadowState:
        return ShadowState(ShadowCounts(num_answers=num_answers), elapsed_s)

    assert is_progress(known(0, 0.0), known(1, 1.0))
    assert not is_progress(known(4, 10.0), known(7, 29.0))
    assert is_progress(known(4, 10.0), known(8, 11.0))
    assert is_progress(known(4, 10.0), known(4, 30.0))
