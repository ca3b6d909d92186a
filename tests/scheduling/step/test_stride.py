"""Shape classes share the device: urgency over instants, fairness over seconds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from noria.scheduling.step.stride import StrideScheduler
from noria.scheduling.types import BatchKey

A, B, C = BatchKey(64, 64), BatchKey(96, 64), BatchKey(128, 64)


def run_iterations(stride, num, num_running, urgent, iteration_s):
    """The classes that stepped, and what each has had."""
    had = dict.fromkeys(num_running, 0.0)
    order = []
    for _ in range(num):
        batch_key = stride.next(num_running, urgent)
        stride.charge(batch_key, iteration_s[batch_key], num_running[batch_key])
        had[batch_key] += iteration_s[batch_key]
        order.append(batch_key)
    return order, had


def test_the_urgent_class_goes_first_until_the_other_is_owed_half_a_second():
    order, _ = run_iterations(StrideScheduler(), 8, {A: 1, B: 1}, A, {A: 0.2, B: 0.2})
    assert order == [A, A, A, B, A, B, A, B]


def test_shares_are_in_proportion_to_the_images_seated():
    _, had = run_iterations(StrideScheduler(), 1000, {A: 3, B: 1}, A, {A: 0.1, B: 0.1})
    assert had[A] == pytest.approx(75.0, abs=0.6)


def test_who_comes_anew_or_again_starts_level():
    stride = StrideScheduler()
    run_iterations(stride, 100, {A: 1}, A, {A: 1.0})
    order, _ = run_iterations(stride, 4, {A: 1, B: 1}, A, {A: 0.4, B: 0.4})
    assert order == [A, A, B, A]  # nothing was saved up while B was away


def test_of_several_classes_it_is_the_one_that_is_owed_most_that_goes():
    """By images, B is furthest behind; C is owed more of the device, as it has more of them."""
    stride = StrideScheduler()
    stride.next({A: 1, B: 1, C: 10}, A)
    stride.charge(A, 0.4, 1)
    stride.charge(C, 1.0, 10)
    assert stride.next({A: 1, B: 1, C: 10}, A) is C


@given(
    num_seated=st.dictionaries(st.sampled_from([A, B, C]), st.integers(1, 32), min_size=1),
    turn_s=st.fixed_dictionaries({shape: st.floats(0.001, 3.0) for shape in (A, B, C)}),
    data=st.data(),
)
def test_no_class_starves_another_whichever_is_urgent(num_seated, turn_s, data):
    """Stated: a class lacks at most half a second, and one turn of each class, to its share by images seated."""
    stride, had = StrideScheduler(), dict.fromkeys(num_seated, 0.0)
    urgent = st.sampled_from(list(num_seated))
    for _ in range(60):
        batch_key = stride.next(num_seated, data.draw(urgent))
        stride.charge(batch_key, turn_s[batch_key], num_seated[batch_key])
        had[batch_key] += turn_s[batch_key]
        total, everybody = sum(had.values()), sum(num_seated.values())
        for each, num in num_seated.items():
            assert total * num / everybody - had[each] <= 0.5 + sum(turn_s[other] for other in num_seated) + 1e-9
