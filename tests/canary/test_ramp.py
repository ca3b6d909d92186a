"""Ramps: their plans as text, and their steps over time."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.canary.ramp import (
    MAX_GAP_S,
    RampPlan,
    RampState,
    advance,
    parse_ramp,
    promote,
    roll_back,
    start_ramp,
    weight,
)

PLAN = parse_ramp("5,25,100 every 1m")


@pytest.mark.parametrize(
    ("text", "percents", "step_s"),
    [
        ("5,25,50,100 every 10m", (5, 25, 50, 100), 600),
        (" 5%, 12.5 % ,100%  every 1.5 h ", (5, 12.5, 100), 5400),
        ("5", (5,), 600),
        ("100 every 30d", (100,), 30 * 86400),
    ],
)
def test_a_plan_is_read(text, percents, step_s):
    assert parse_ramp(text) == RampPlan(percents, step_s)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "such as '5,25,50,100 every 10m'"),
        ("5,,25", "such as '5,25,50,100 every 10m'"),
        ("5,25 every 10", "units are s, m, h and d"),
        ("5,25 every 10 parsecs", "units are s, m, h and d"),
        ("-5,25", "such as"),
        ("nan", "such as"),
        ("5 " * 1000, "such as"),
        ("0,25", "'0,25'; the per cents of a ramp are above 0 and at most 100"),
        ("5,101", "above 0 and at most 100"),
        ("25,5", "'25,5'; each step of a ramp is above the one before"),
        ("5,5", "each step of a ramp is above the one before"),
        (",".join(map(str, range(1, 22))), "21 steps; a ramp has 1 to 20"),
        ("5 every 1s", "a step of 1 s; a step lasts 10 s to"),
        ("5 every 31d", "a step of 2.6784e[+]06 s; a step lasts"),
    ],
)
def test_a_plan_that_is_none_is_rejected(text, message):
    with pytest.raises(ValueError, match=message):
        parse_ramp(text)


def run(plan, calls, state=None):
    """The states after calls, each 5 s after the one before: outcomes, or "away" for an unknown one."""
    now, states = (state.updated_at, [state]) if state else (0.0, [start_ramp(plan, 0.0)])
    for call in calls:
        now += 5.0
        outcome = "inconclusive" if call == "away" else call
        states.append(advance(plan, states[-1], outcome, now, registry_answers=call != "away"))
    return states


def statuses(states):
    """Each status and weight once in a row."""
    pairs = [(state.status, weight(PLAN, state)) for state in states]
    return [pair for k, pair in enumerate(pairs) if k == 0 or pair != pairs[k - 1]]


def test_steps_go_on_while_the_judge_is_unsure_and_the_promotion_waits_for_a_pass():
    states = run(PLAN, ["inconclusive"] * 40 + ["pass"])
    assert statuses(states) == [("ramping", 0.05), ("ramping", 0.25), ("waiting", 0.25), ("promoted", 1.0)]
    assert [state.step for state in states].index(1) == 12  # after 60 s


def test_an_early_pass_does_not_shorten_a_step():
    states = run(PLAN, ["pass"] * 30)
    assert statuses(states) == [("ramping", 0.05), ("ramping", 0.25), ("promoted", 1.0)]
    assert [weight(PLAN, state) for state in states].index(1.0) == 24


def test_a_ramp_pauses_while_the_registry_is_away_and_goes_on_where_it_was():
    states = run(PLAN, ["inconclusive"] * 6 + ["away"] * 100 + ["inconclusive"] * 7)
    assert statuses(states) == [("ramping", 0.05), ("paused", 0.05), ("ramping", 0.05), ("ramping", 0.25)]
    assert states[-1].elapsed_s == 5.0


def test_a_paused_ramp_is_rolled_back_when_the_canary_fails():
    states = run(PLAN, ["away", "fail", "pass", "away"])
    assert statuses(states) == [("ramping", 0.05), ("paused", 0.05), ("rolled_back", 0.0)]


def test_a_plan_below_100_holds_until_somebody_decides():
    plan = RampPlan((5.0,))
    holding = run(plan, ["pass"] * 300)[-1]
    assert (holding.status, weight(plan, holding)) == ("holding", 0.05)
    assert weight(plan, promote(plan, holding, 1.0)) == 1.0
    rolled_back = roll_back(holding, 1.0)
    assert weight(plan, rolled_back) == 0.0
    assert promote(plan, rolled_back, 2.0) == roll_back(rolled_back, 2.0) == rolled_back


def test_a_deploy_without_a_canary_is_promoted_at_once():
    assert start_ramp(parse_ramp("100"), 0.0).status == "promoted"


def test_an_outage_of_the_caller_and_a_clock_set_back_count_little():
    state = RampState("ramping", 0, 20.0, 1000.0)
    assert advance(PLAN, state, "pass", 9000.0).elapsed_s == 20.0 + MAX_GAP_S
    assert advance(PLAN, state, "pass", 0.0) == RampState("ramping", 0, 20.0, 0.0)


calls = st.lists(st.sampled_from(["inconclusive", "pass", "away", "inconclusive", "pass", "fail"]), max_size=60)


@settings(max_examples=40)
@given(calls)
def test_the_weight_only_grows_until_a_fail_and_final_states_stay(made):
    states = run(PLAN, made)
    shares = [weight(PLAN, state) for state in states]
    for k, call in enumerate(made):
        before, after = states[k], states[k + 1]
        if before.is_final:
            assert after == before
        elif call == "fail":
            assert (after.status, shares[k + 1]) == ("rolled_back", 0.0)
        else:
            assert shares[k] <= shares[k + 1]
            assert after.status != "promoted" or call == "pass"
    assert all(msgspec.json.decode(msgspec.json.encode(state), type=RampState) == state for state in states)
