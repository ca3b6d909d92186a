"""Batch keys share the device: urgency decides over short periods, fairness over seconds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.protocol.model_spec import ModelKey
from noria.scheduling.shares.stride import StrideScheduler
from noria.scheduling.types import BatchKey

A, B, C = BatchKey(64, 64), BatchKey(96, 64), BatchKey(128, 64)
OLD, NEW = (BatchKey(64, 64, ModelKey("shapes", version)) for version in ("old", "new"))


def run_iterations(stride, num, num_running, urgent, iteration_s):
    """Return the keys that stepped, in order, and the device time of each."""
    used_s = dict.fromkeys(num_running, 0.0)
    order = []
    for _ in range(num):
        batch_key = stride.next(num_running, urgent)
        stride.charge(batch_key, iteration_s[batch_key])
        used_s[batch_key] += iteration_s[batch_key]
        order.append(batch_key)
    return order, used_s


def test_the_urgent_key_steps_until_the_other_is_owed_half_a_second():
    order, _ = run_iterations(StrideScheduler(), 8, {A: 1, B: 1}, A, {A: 0.2, B: 0.2})
    assert order == [A, A, A, B, A, B, A, B]


def test_shares_are_proportional_to_the_running_images():
    _, used_s = run_iterations(StrideScheduler(), 1000, {A: 3, B: 1}, A, {A: 0.1, B: 0.1})
    assert used_s[A] == pytest.approx(75.0, abs=0.6)


def test_a_new_or_returning_key_has_no_credit():
    stride = StrideScheduler()
    run_iterations(stride, 100, {A: 1}, A, {A: 1.0})
    order, _ = run_iterations(stride, 4, {A: 1, B: 1}, A, {A: 0.4, B: 0.4})
    assert order == [A, A, B, A]  # B accumulated no credit while it had no images


def test_of_several_keys_the_one_furthest_behind_per_image_steps():
    """C is owed more device time because it has more images."""
    stride = StrideScheduler()
    stride.next({A: 1, B: 1, C: 10}, A)
    stride.charge(A, 0.4)
    stride.charge(C, 1.0)
    assert stride.next({A: 1, B: 1, C: 10}, A) is B


def test_a_key_with_many_images_keeps_none_with_fewer_waiting():
    """After one slow step of A, C is owed 46.8 s and B 38.5 s; B must not wait until they are equal."""
    _, used_s = run_iterations(StrideScheduler(), 6, {A: 1, B: 14, C: 17}, A, {A: 2.75, B: 0.25, C: 2.0})
    assert sum(used_s.values()) * 14 / 32 - used_s[B] <= 0.5 + 2.75 + 0.25 + 2.0


@pytest.mark.parametrize("urgent", [OLD, NEW])
def test_versions_of_one_model_take_turns_whichever_is_urgent_and_however_few_images_one_has(urgent):
    order, _ = run_iterations(StrideScheduler(), 6, {OLD: 7, NEW: 1}, urgent, {OLD: 0.7, NEW: 0.3})
    assert order == [OLD, NEW, OLD, NEW, OLD, NEW]


def test_versions_of_one_model_share_the_time_of_their_images_with_another_model():
    other = BatchKey(64, 64, ModelKey("other", "1"))
    num_running, iteration_s = {OLD: 3, NEW: 1, other: 4}, {OLD: 0.2, NEW: 0.1, other: 0.1}
    order, used_s = run_iterations(StrideScheduler(), 1000, num_running, OLD, iteration_s)
    assert used_s[OLD] + used_s[NEW] == pytest.approx(used_s[other], abs=1.0)
    assert abs(order.count(OLD) - order.count(NEW)) <= 1


@given(
    num_running=st.dictionaries(st.sampled_from([A, B, C]), st.integers(1, 32), min_size=1),
    iteration_s=st.fixed_dictionaries({batch_key: st.floats(0.001, 3.0) for batch_key in (A, B, C)}),
    data=st.data(),
)
def test_no_key_starves_another_whichever_is_urgent(num_running, iteration_s, data):
    """A key falls short of its share by at most half a second and one iteration of each key."""
    stride, used_s = StrideScheduler(), dict.fromkeys(num_running, 0.0)
    urgent = st.sampled_from(list(num_running))
    for _ in range(60):
        batch_key = stride.next(num_running, data.draw(urgent))
        stride.charge(batch_key, iteration_s[batch_key])
        used_s[batch_key] += iteration_s[batch_key]
        total_s, num_images = sum(used_s.values()), sum(num_running.values())
        for each, num in num_running.items():
            assert (
                total_s * num / num_images - used_s[each]
                <= 0.5 + sum(iteration_s[other] for other in num_running) + 1e-9
            )
