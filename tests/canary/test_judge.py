"""The judge: its promise without a difference, what it finds, and what it survives."""

import itertools
import json
import math
import random

import msgspec
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from noria.canary.arm import Arm
from noria.canary.judge import JudgeSettings, JudgeState, step, verdict

SETTINGS = JudgeSettings(guards=("label",))


def arm(n, errors=0, seconds=(), label=None, rejections=0):
    return Arm(n, errors, {"64x64": list(seconds)} if seconds else {}, {"label": label} if label else {}, rejections)


def random_arm(rng, n, error_rate=0.005, slower=1.0, shift=0.0, rejection_rate=0.05):
    """An arm as a healthy control has it, unless told otherwise."""
    num_rejected = sum(rng.random() < rejection_rate for _ in range(n))
    all_responses, n = n, n - num_rejected
    seconds = [slower * rng.lognormvariate(0, 0.4) for _ in range(n)]
    cells = [str(min(4, max(0, math.floor(rng.gauss(2.5 + shift, 1))))) for _ in range(n)]
    errors = sum(rng.random() < error_rate for _ in range(n))
    return arm(all_responses, errors, seconds, {cell: cells.count(cell) for cell in set(cells)}, num_rejected)


def judged(rng, num_windows, settings=SETTINGS, n=(95, 5), **canary):
    """The verdicts after each window, up to the first that is a fail or a pass."""
    state, verdicts = JudgeState(), []
    for _ in range(num_windows):
        state = step(state, random_arm(rng, n[0]), random_arm(rng, n[1], **canary), settings)
        verdicts.append(verdict(state, settings))
        if verdicts[-1].outcome != "inconclusive":
            break
    return state, verdicts


def any_arm(rng):
    n = rng.randrange(40)
    label = {cell: rng.randrange(40) for cell in "abc" if rng.random() < 0.5}
    errors = rng.randrange(n + 1)
    seconds = [rng.uniform(0.1, 10) for _ in range(rng.randrange(4))]
    return arm(n, errors, seconds, label, rng.randrange(n - errors + 1))


arms = st.integers(0, 10**6).map(random.Random).map(any_arm)
pasts = st.integers(0, 10**6).map(random.Random).map(lambda rng: [(any_arm(rng), any_arm(rng)) for _ in range(3)])


def state_after(past, settings=SETTINGS):
    state = JudgeState()
    for control, canary in past:
        state = step(state, control, canary, settings)
    return state


@settings(max_examples=20)
@given(pasts, st.integers(1, 4), st.integers(1, 4), st.floats(0.01, 0.99))
def test_no_guards_evidence_is_expected_to_grow_without_a_difference(past, n_canary, n_control, p):
    # All outcomes of one more window: x of n fail or are rejected, as many have a label, and the canary is slower by
    # chance.
    state, expectations = state_after(past), dict.fromkeys(("errors", "rejections", "latency", "label"), 0.0)
    for x, y in itertools.product(range(n_canary + 1), range(n_control + 1)):
        probability = (
            math.comb(n_canary, x) * math.comb(n_control, y) * p ** (x + y) * (1 - p) ** (n_canary + n_control - x - y)
        )
        for seconds in (1.0, 3.0):
            canary = arm(n_canary, x, (seconds,), {"a": x, "b": n_canary - x})
            control = arm(n_control, y, (4.0 - seconds,), {"a": y, "b": n_control - y})
            rejected = arm(n_control, rejections=y), arm(n_canary, rejections=x)
            results = verdict(step(state, control, canary, SETTINGS), SETTINGS).e_by_guard
            of_rejected = verdict(step(state, *rejected, SETTINGS), SETTINGS).e_by_guard["rejections"]
            for guard, result in {**results, "rejections": of_rejected}.items():
                expectations[guard] += probability / 2 * result.e
    before = verdict(state, SETTINGS).e_by_guard
    for guard, expectation in expectations.items():
        assert expectation <= before[guard].e * (1 + 1e-9)


def test_few_canaries_fail_without_a_difference_though_all_windows_are_looked_at():
    rng, settings = random.Random(1), JudgeSettings(guards=("label",), min_responses=1, min_error_increase=0, max_psi=0)
    outcomes = [judged(rng, 12, settings, n=(20, 20), error_rate=0.005)[1][-1].outcome for _ in range(150)]
    # At a true 5 %, 25 or more of 150 have a probability below 1e-6.
    assert outcomes.count("fail") < 25
    assert scipy.stats.binom.sf(24, 150, 0.05) < 1e-6


@pytest.mark.parametrize(
    ("canary", "guard"),
    [
        ({"error_rate": 0.3}, "errors"),
        ({"rejection_rate": 0.4}, "rejections"),
        ({"slower": 3.0}, "latency"),
        ({"shift": 1.5}, "label"),
    ],
)
def test_a_bad_canary_fails_by_its_guard(canary, guard):
    state, verdicts = judged(random.Random(1), 60, **canary)
    assert verdicts[-1].outcome == "fail"
    assert 10 <= state.num_canary <= 150
    results = verdicts[-1].e_by_guard
    assert max(results, key=lambda name: results[name].counted_e) == guard
    assert verdicts[-1].reason.startswith(guard) and "and fails from" in verdicts[-1].reason


def test_a_canary_without_any_good_response_is_stopped_before_the_minimum():
    state, verdicts = judged(random.Random(1), 60, error_rate=1.0)
    assert verdicts[-1].outcome == "fail"
    assert 10 <= state.num_canary <= 20


def test_a_good_canary_passes_after_it_said_what_it_waits_for():
    state, verdicts = judged(random.Random(2), 200, n=(50, 25))
    assert verdicts[-1].outcome == "pass"
    assert verdicts[-1].interval[1] < SETTINGS.max_error_increase
    first = verdicts[0].reason
    assert "25 of 80 responses" in first and "errors: at most" in first
    assert "rejections: at most" in first and "latency: the evidence" in first and "label: " in first
    assert state.num_canary >= 200


def test_errors_are_a_share_of_what_was_not_rejected():
    # The canary accepts more, so as large a share of what is accepted fails, though more responses are errors.
    state = JudgeState()
    for _ in range(40):
        state = step(state, arm(20, 1, rejections=10), arm(20, 2), SETTINGS)
    found = verdict(state, SETTINGS).e_by_guard
    assert (found["errors"].effect, found["rejections"].effect) == (0.0, -0.5)


def test_a_canary_that_may_reject_all_is_not_rolled_back_for_it():
    settings = JudgeSettings(judges_latency=False, max_rejection_increase=1.0)
    state = JudgeState()
    for _ in range(60):
        state = step(state, arm(20), arm(20, rejections=15), settings)
    assert verdict(state, settings).outcome == "pass"


@pytest.mark.parametrize("num_users", [2, 100])
def test_few_users_are_said_with_how_many_are_needed(num_users):
    state = JudgeState()
    for users in (num_users, 0, 0):
        state = step(state, Arm(4 * users, repeats=900), Arm(users, repeats=80), SETTINGS)
    assert verdict(state, SETTINGS).reason.startswith(
        f"too few users: {num_users} of the canary and {4 * num_users} of the control, whose first responses count "
        "(the key is sticky), and 2940 later ones do not; 80 users of the canary are needed to roll back, 230 or more "
        "to pass; "
    )


def test_users_that_pass_are_not_too_few():
    settings = JudgeSettings(judges_latency=False)
    state = step(JudgeState(), Arm(900, repeats=9000), Arm(300, repeats=3000), settings)
    assert verdict(state, settings).outcome == "pass"
    state = step(JudgeState(), Arm(40, repeats=30), Arm(4), settings)
    assert verdict(state, settings).reason.startswith("4 of 80 responses of the canary")


def test_a_difference_within_the_floors_never_fails():
    # A hundredth of a point more errors in a million requests is certain, and does not matter.
    state = JudgeState()
    for _ in range(20):
        state = step(state, arm(10**7, 10**5), arm(10**7, 10**5 + 10**4), SETTINGS)
    result = verdict(state, SETTINGS).e_by_guard["errors"]
    assert result.effect == pytest.approx(0.001)
    assert result.counted_e == 0.0


@settings(max_examples=20)
@given(pasts)
def test_the_evidence_survives_as_json(past):
    state = state_after(past)
    raw = msgspec.json.encode(state)
    assert msgspec.json.decode(raw, type=JudgeState) == state
    assert "NaN" not in json.dumps(json.loads(raw))
    assert msgspec.json.decode(msgspec.json.encode(verdict(state, SETTINGS)))["outcome"] != "pass"


def test_evidence_of_other_alternatives_is_rejected():
    with pytest.raises(msgspec.ValidationError, match="another version of the judge"):
        msgspec.json.decode('{"errors_log_e": [0.0]}', type=JudgeState)


@settings(max_examples=20)
@given(pasts, arms)
def test_an_empty_window_changes_nothing_and_one_arm_alone_is_no_evidence(past, alone):
    state = state_after(past)
    assert step(state, Arm(), Arm(), SETTINGS) == state
    before = verdict(state, SETTINGS).e_by_guard
    for window in ((alone, Arm()), (Arm(), alone)):
        after = verdict(step(state, *window, SETTINGS), SETTINGS).e_by_guard
        assert {guard: result.e for guard, result in after.items()} == {
            guard: result.e for guard, result in before.items()
        }


def test_latencies_that_are_no_numbers_are_left_out_and_counted():
    bad = [math.nan, math.inf, -1.0]
    state = step(JudgeState(), arm(4, 0, [*bad, 1.0]), arm(4, 0, [*bad, 1.1]), SETTINGS)
    assert (state.num_pairs, state.num_slower, state.num_invalid) == (1, 0, 6)


def test_only_latencies_of_one_shape_are_compared():
    control, canary = Arm(9, 0, {"a": [1.0] * 8, "b": [1.0]}), Arm(3, 0, {"a": [2.0, 2.0], "c": [9.0]})
    state = step(JudgeState(), control, canary, SETTINGS)
    assert (state.num_pairs, state.num_slower) == (2, 2)


def test_the_state_stays_bounded_with_endless_categories():
    state = JudgeState()
    for window in range(5):
        label = {f"{window}-{k}": k for k in range(1000)}
        state = step(state, arm(10, 0, (), label), arm(10, 0, (), label), SETTINGS)
    evidence = state.guards["label"]
    assert len(evidence.control) == 65 and sum(evidence.control.values()) == 5 * sum(range(1000))
    assert evidence.log_e < 0.1


def test_a_category_that_only_the_canary_has_fails():
    state = JudgeState()
    for _ in range(16):
        state = step(state, arm(95, 0, (), {"cat": 95}), arm(5, 0, (), {"cat": 3, "error text": 2}), SETTINGS)
    assert verdict(state, SETTINGS).outcome == "fail"


def test_what_is_not_declared_is_ignored_and_what_is_missing_never_passes():
    state = JudgeState()
    for _ in range(50):
        state = step(state, Arm(100, cells={"surprise": {"a": 9}}), Arm(100), SETTINGS)
    assert set(state.guards) == {"label"}
    found = verdict(state, SETTINGS)
    assert (found.outcome, found.reason) == (
        "inconclusive",
        "latency: the evidence that the canary is not slower is 1, and passes from 20; label: 0 of 200 values",
    )
    assert verdict(state, JudgeSettings(judges_latency=False)).outcome == "pass"


@settings(max_examples=20)
@given(arms, arms)
def test_a_merged_arm_has_all_of_both(first, second):
    merged = first.merge(second)
    for count in ("n", "errors", "rejections", "repeats"):
        assert getattr(merged, count) == getattr(first, count) + getattr(second, count)
    for each in (first, second):
        assert each.latencies.get("64x64", []) == [] or set(each.latencies["64x64"]) <= set(merged.latencies["64x64"])
    assert sum(merged.cells.get("label", {}).values()) == sum(
        sum(each.cells.get("label", {}).values()) for each in (first, second)
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Arm(1, 2), "2 errors and 0 rejections of 1 responses"),
        (lambda: Arm(-1), "0 errors and 0 rejections of -1 responses"),
        (lambda: Arm(1, cells={"x": {"a": -1}}), "guard 'x' has"),
        (lambda: Arm(2, 1, rejections=2), "1 errors and 2 rejections of 2 responses"),
        (lambda: Arm(repeats=-1), "-1 repeats"),
        (lambda: JudgeSettings(guards=("errors",)), "errors has its own guard"),
        (lambda: JudgeSettings(guards=("rejections",)), "rejections has its own guard"),
        (lambda: JudgeSettings(guards=("a", "a")), "allowed are at most 16, each once"),
        (lambda: JudgeSettings(guards=("no name",)), "'no name' is no name of a variable"),
    ],
)
def test_impossible_values_are_rejected(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("name", "values", "words"),
    [
        ("alpha", (0, 1, math.nan), "above 0 and below 1"),
        ("min_responses", (0,), "1 or more"),
        ("hard_stop_responses", (0,), "1 or more"),
        ("hard_stop_e", (19.9,), "20 or more"),
        ("min_error_increase", (-0.1, 1), "0 to below 1"),
        ("max_error_increase", (0, 1.1), "above 0 to 1"),
        ("max_rejection_increase", (0, 1.1), "above 0 to 1"),
        ("latency_tolerance", (0.9, math.inf), "1 or more"),
        ("max_psi", (-0.1, math.inf), "0 or more"),
    ],
)
def test_settings_outside_their_bounds_are_rejected(name, values, words):
    for value in values:
        with pytest.raises(ValueError, match=f"^{name} is {value}; allowed is {words}$"):
            JudgeSettings(**{name: value})


def test_the_bounds_of_settings_are_allowed():
    JudgeSettings((), True, 0.05, 1, 1, 20, 0, 1, 1, 1, 0)
