"""The cost model: curves, the pace, the knee, the memory."""

import pytest

from noria.scheduling.costs import CostModel, Curve
from noria.scheduling.plans import ShapeClass

SMALL, LARGE = ShapeClass(64, 64, "m"), ShapeClass(128, 128, "m")


def test_an_empty_curve_knows_nothing():
    assert Curve().at(4) == 0.0
    assert Curve().knee(8) == 8


def test_between_two_measurements_a_curve_is_a_straight_line_and_goes_on_beyond_the_last():
    curve = Curve({2: 1.0, 4: 2.0, 8: 3.0})
    assert [curve.at(count) for count in (1, 2, 3, 4, 6, 8, 12)] == [
        1.0,
        1.0,
        1.5,
        2.0,
        2.5,
        3.0,
        pytest.approx(13 / 3),
    ]


def test_a_single_measurement_is_taken_to_grow_in_proportion_and_not_to_shrink():
    assert [Curve({4: 2.0}).at(count) for count in (1, 4, 8)] == [2.0, 2.0, 4.0]


def test_more_is_never_expected_to_be_quicker():
    assert Curve({2: 1.0, 4: 0.5}).at(8) == 1.0


def test_what_is_measured_is_the_mean_of_fifty_and_then_moves_slowly():
    curve = Curve()
    for seconds in (1.0, 2.0, 3.0):
        curve.observe(2, seconds)
    assert curve.at(2) == pytest.approx(2.0)
    for _ in range(1000):
        curve.observe(2, 2.0)
    curve.observe(2, 3.0)
    assert curve.at(2) == pytest.approx(2.02)


def test_the_first_turn_of_a_new_kernel_does_not_spoil_what_is_known():
    curve = Curve({2: 1.0, 8: 2.0})
    curve.observe(4, 100.0)  # 4/3 on the line
    assert curve.at(4) == pytest.approx(4 * 4 / 3)
    curve.observe(2, 100.0)
    assert curve.at(2) == pytest.approx(1.0 + 0.02 * 3.0)


def test_the_knee_is_the_smallest_batch_within_a_twentieth_of_the_best_throughput():
    assert Curve({1: 1.0, 2: 1.0, 4: 1.2, 8: 2.35, 16: 4.7}).knee(16) == 4
    assert Curve({1: 1.0, 2: 2.0, 4: 4.0}).knee(4) == 1  # batching gains nothing
    assert Curve({1: 1.0, 2: 1.0, 4: 1.0}).knee(4) == 4


def test_the_knee_is_the_most_while_that_was_not_tried():
    assert Curve({1: 1.0, 2: 2.0, 4: 4.0}).knee(16) == 16


def test_the_knee_says_nothing_beyond_the_most():
    assert Curve({2: 1.0, 8: 1.0, 16: 1.0}).knee(8) == 8
    assert Curve({8: 1.0}).knee(4) == 4


def test_a_count_that_was_tried_once_does_not_move_the_knee():
    curve = Curve({1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0})
    curve.observe(3, 0.1)  # a clock that slipped
    assert curve.knee(8) == 8
    for _ in range(2):
        curve.observe(3, 0.25)
    assert curve.knee(8) == 3


def test_nothing_known_costs_nothing_and_allows_everything():
    costs = CostModel(most_rows=12)
    assert (costs.step_s(SMALL, 4), costs.decode_s(SMALL), costs.prompt_s("m")) == (0.0, 0.0, 0.0)
    assert (costs.rows_limit(SMALL), costs.longest_s) == (12, 0.0)


def test_a_size_that_was_never_seen_costs_as_the_nearest_of_its_model_by_area():
    costs = CostModel(steps={SMALL: Curve({2: 1.0}), ShapeClass(32, 32, "m"): Curve({2: 9.0})})
    assert costs.step_s(LARGE, 2) == pytest.approx(4**1.1)
    assert costs.step_s(ShapeClass(128, 128, "another"), 2) == 0.0


def test_decoding_nothing_costs_nothing():
    costs = CostModel(decodes={SMALL: Curve({1: 1.0})})
    assert (costs.decode_s(SMALL, 0), costs.decode_s(SMALL, 2)) == (0.0, 2.0)


def test_the_pace_follows_what_troubles_everything_within_some_twenty_turns():
    costs = CostModel(steps={SMALL: Curve({2: 1.0, 4: 1.5})}, decodes={SMALL: Curve({1: 1.0})}, encode_s={"m": 1.0})
    for _ in range(20):
        costs.observe_step(SMALL, 2, 2.0)
    assert costs.step_s(SMALL, 2) == pytest.approx(2.0, rel=0.15)
    assert costs.step_s(SMALL, 4) == pytest.approx(3.0, rel=0.25)  # though nobody has seen it since
    assert (costs.decode_s(SMALL), costs.prompt_s("m")) == (costs.pace, costs.pace)
    for _ in range(100):
        costs.observe_step(SMALL, 2, 1.0)
    assert costs.step_s(SMALL, 2) == pytest.approx(1.0, rel=0.05)
    assert costs.step_s(SMALL, 4) == pytest.approx(1.5, rel=0.25)


def test_what_the_pace_does_not_explain_the_curve_learns():
    costs = CostModel(steps={SMALL: Curve({2: 1.0, 4: 1.0})})
    for _ in range(300):
        costs.observe_step(SMALL, 2, 1.0)
        costs.observe_step(SMALL, 4, 2.0)
    assert costs.step_s(SMALL, 2) == pytest.approx(1.0, rel=0.1)
    assert costs.step_s(SMALL, 4) == pytest.approx(2.0, rel=0.1)


def test_a_count_that_is_new_at_a_slow_hour_is_not_counted_slow_twice():
    costs = CostModel(steps={SMALL: Curve({2: 1.0, 8: 1.0})}, decodes={SMALL: Curve({1: 1.0, 4: 1.0})}, pace=2.0)
    costs.observe_step(SMALL, 4, 2.0)
    costs.observe_decode(SMALL, 2, 2.0)
    assert (costs.pace, costs.step_s(SMALL, 4), costs.decode_s(SMALL, 2)) == (2.0, 2.0, 2.0)


def test_decodes_and_prompts_are_learned_too():
    costs = CostModel()
    costs.observe_decode(SMALL, 2, 0.5)
    costs.observe_decode(SMALL, 2, 0.7)
    costs.observe_encode("m", 2, 0.4)
    costs.observe_encode("m", 1, 0.4)
    assert costs.decode_s(SMALL, 2) == pytest.approx(0.6)
    assert costs.prompt_s("m") == pytest.approx(0.204)
    assert costs.longest_s == pytest.approx(0.6)


def test_the_batch_limit_is_the_knee_once_it_is_settled_within_the_memory():
    costs = CostModel(most_rows=8, steps={SMALL: Curve({1: 1.0, 2: 1.0, 4: 1.0, 8: 2.0})})
    assert costs.rows_limit(SMALL) == 8
    costs.settle()
    assert costs.rows_limit(SMALL) == 4
    costs.overflowed(SMALL, 4)
    assert costs.rows_limit(SMALL) == 2
    costs.overflowed(SMALL, 2)
    costs.overflowed(SMALL, 1)
    assert costs.rows_limit(SMALL) == 1


def test_a_knee_that_was_found_on_a_bad_day_is_found_again():
    shape = ShapeClass(64, 64, "m")
    true_s = {1: 0.010, 2: 0.011, 4: 0.013, 8: 0.018, 16: 0.028, 32: 0.048}
    costs = CostModel(32, {shape: Curve(true_s | {8: 0.05, 16: 0.1, 32: 0.2})})
    costs.settle()
    assert costs.rows_limit(shape) == 4
    tried = set()
    for _ in range(40_000):  # half an hour of a model that takes 50 ms a step
        rows = costs.rows_to_try(shape)
        tried.add(rows)
        costs.observe_step(shape, rows, Curve(dict(true_s)).at(rows))
    assert costs.rows_limit(shape) == 32
    assert tried == {4, 8, 16, 32}


def test_more_than_the_memory_holds_is_never_tried():
    shape = ShapeClass(64, 64, "m")
    costs = CostModel(32, {shape: Curve({1: 1.0, 2: 1.0, 4: 2.0, 32: 16.0})})
    costs.settle()
    assert costs.rows_limit(shape) == 2
    costs.overflowed(shape, 6)
    assert max(costs.rows_to_try(shape) for _ in range(1000)) == 3


def test_without_news_a_pace_fades():
    costs = CostModel(8, {ShapeClass(64, 64, "m"): Curve({1: 1.0})}, pace=4.0)
    costs.rest(3.0)
    assert 1.0 < costs.pace < 2.5
    costs.rest(60.0)
    assert costs.pace == pytest.approx(1.0)


def test_of_two_measurements_the_quicker_counts():
    shape = ShapeClass(64, 64, "m")
    first = CostModel(8, {shape: Curve({1: 1.0, 2: 5.0, 4: 3.0})}, {shape: Curve({1: 2.0})}, {"m": 1.0})
    second = CostModel(8, {shape: Curve({1: 1.5, 2: 2.0})}, {shape: Curve({1: 1.0})}, {"m": 3.0})
    first.take_the_quicker(second)
    assert first.steps[shape].points == {1: 1.0, 2: 2.0, 4: 3.0}
    assert first.decodes[shape].points == {1: 1.0}
    assert first.encode_s == {"m": 1.0}
