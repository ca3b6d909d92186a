"""The cost model: curves, slowdown, knee and memory limits."""

import math

import pytest

from noria.protocol.model_spec import ModelKey
from noria.scheduling.costs import CostCurve, CostModel
from noria.scheduling.types import BatchKey

MODEL = ModelKey("m")

SMALL, LARGE = BatchKey(64, 64, MODEL), BatchKey(128, 128, MODEL)


def test_a_few_rows_more_than_the_limit_share_the_call_if_they_fit():
    costs = CostModel(max_rows=16)
    assert [costs.stretched_limit(SMALL, 10, rows) for rows in (1, 10, 11, 14, 15, 30)] == [10, 10, 11, 14, 10, 10]
    assert [costs.stretched_limit(SMALL, 14, rows) for rows in (16, 17)] == [16, 14]
    costs.record_oom(SMALL, 24)
    assert [costs.stretched_limit(SMALL, 10, rows) for rows in (12, 13)] == [12, 10]


def test_an_empty_curve_returns_zero_and_no_knee():
    assert CostCurve().at(4) == 0.0
    assert CostCurve().knee(8) is None


def test_a_curve_interpolates_and_extrapolates_linearly():
    curve = CostCurve({2: 1.0, 4: 2.0, 8: 3.0})
    assert [curve.at(count) for count in (1, 2, 3, 4, 6, 8, 12)] == [
        1.0,
        1.0,
        1.5,
        2.0,
        2.5,
        3.0,
        pytest.approx(13 / 3),
    ]


def test_a_single_measurement_grows_in_proportion_and_does_not_shrink():
    assert [CostCurve({4: 2.0}).at(count) for count in (1, 4, 8)] == [2.0, 2.0, 4.0]


def test_extrapolation_never_decreases():
    assert CostCurve({2: 1.0, 4: 0.5}).at(8) == 1.0


@pytest.mark.parametrize(
    ("points", "overhead"),
    [
        ({8: 18.0, 32: 42.0, 512: 522.0}, 10.0),
        ({8: 18.0, 32: 42.0 * 1.02, 128: 138.0 * 0.98, 512: 522.0 * 1.02}, 10.0),  # measurements are not exact
        ({8: 8.0, 32: 32.0, 512: 512.0}, 0.0),
        ({8: 4.0, 512: 512.0}, 0.0),  # a row costs more, the more there are
        ({8: 5.0, 32: 5.0, 512: 5.0}, 512.0),  # rows cost nothing
    ],
)
def test_the_overhead_of_a_call_is_that_of_the_nearest_line(points, overhead):
    assert CostCurve(points).overhead() == pytest.approx(overhead, rel=0.15, abs=1e-6)
    assert CostCurve(dict([*points.items()][:1])).overhead() is None


def test_a_point_is_the_mean_of_fifty_measurements_and_then_a_moving_average():
    curve = CostCurve()
    for seconds in (1.0, 2.0, 3.0):
        curve.observe(2, seconds)
    assert curve.at(2) == pytest.approx(2.0)
    for _ in range(1000):
        curve.observe(2, 2.0)
    curve.observe(2, 3.0)
    assert curve.at(2) == pytest.approx(2.02)


def test_outliers_are_clamped():
    curve = CostCurve({2: 1.0, 8: 2.0})
    curve.observe(4, 100.0)  # 4/3 on the line
    assert curve.at(4) == pytest.approx(4 * 4 / 3)
    curve.observe(2, 100.0)
    assert curve.at(2) == pytest.approx(1.0 + 0.02 * 3.0)


def test_the_knee_is_the_smallest_batch_within_5_percent_of_the_best_throughput():
    assert CostCurve({1: 1.0, 2: 1.0, 4: 1.2, 8: 2.35, 16: 4.7}).knee(16) == 4
    assert CostCurve({1: 1.0, 2: 2.0, 4: 4.0}).knee(4) == 1  # batching gains nothing
    assert CostCurve({1: 1.0, 2: 1.0, 4: 1.0}).knee(4) == 4


def test_there_is_no_knee_while_throughput_grows_up_to_the_largest_measured_batch():
    assert CostCurve({1: 1.0, 2: 1.1, 4: 1.3}).knee(16) is None
    assert CostCurve({1: 1.0, 2: 2.0, 4: 4.0}).knee(16) == 1


def test_calls_grow_by_doubling_while_larger_ones_may_pay_off():
    """However many slots there are: with a thousand rows at once, a step could take minutes or not fit the memory."""
    costs = CostModel(1024, {SMALL: CostCurve({1: 1.0, 2: 1.1, 4: 1.3})})
    costs.refresh_knees()
    assert costs.rows_limit(SMALL) == 8
    for _ in range(3):
        costs.observe_step(SMALL, 8, 1.7)
    costs.refresh_knees()
    assert costs.rows_limit(SMALL) == 16


def test_a_size_that_is_hardly_measured_has_the_limit_of_the_nearest_one():
    large = SMALL._replace(width_px=4 * SMALL.width_px)
    costs = CostModel(1024, {SMALL: CostCurve({1: 1.0, 2: 1.1, 4: 1.3, 8: 2.55, 16: 5.1})})
    costs.refresh_knees()
    assert costs.rows_limit(large) == costs.rows_limit(SMALL) == 4
    costs.steps[large] = CostCurve({1: 1.0})
    costs.refresh_knees()
    assert costs.rows_limit(large) == 4


def test_the_knee_does_not_exceed_the_maximum():
    assert CostCurve({2: 1.0, 8: 1.0, 16: 1.0}).knee(8) == 8
    assert CostCurve({8: 1.0}).knee(4) == 4


def test_a_count_measured_once_does_not_move_the_knee():
    curve = CostCurve({1: 1.0, 2: 1.0, 4: 1.0, 8: 1.0})
    curve.observe(3, 0.1)  # a wrong measurement
    assert curve.knee(8) == 8
    for _ in range(2):
        curve.observe(3, 0.25)
    assert curve.knee(8) == 3


def test_without_measurements_costs_are_zero_and_rows_are_unlimited():
    costs = CostModel(max_rows=12)
    assert (costs.step_s(SMALL, 4), costs.decode_s(SMALL), costs.text_encode_s(MODEL)) == (0.0, 0.0, 0.0)
    assert (costs.rows_limit(SMALL), costs.longest_s) == (12, 0.0)


def test_an_unmeasured_size_is_scaled_by_area_from_the_nearest_of_its_model():
    costs = CostModel(steps={SMALL: CostCurve({2: 1.0}), BatchKey(32, 32, MODEL): CostCurve({2: 9.0})})
    assert costs.step_s(LARGE, 2) == pytest.approx(4**1.1)
    assert costs.step_s(BatchKey(128, 128, ModelKey("another")), 2) == 0.0


def test_decoding_no_images_costs_nothing():
    costs = CostModel(decodes={SMALL: CostCurve({1: 1.0})})
    assert (costs.decode_s(SMALL, 0), costs.decode_s(SMALL, 2)) == (0.0, 2.0)


def test_a_start_image_costs_what_decoding_does_until_its_model_has_encoded_one():
    costs = CostModel(decodes={SMALL: CostCurve({1: 1.0})}, slowdown=2.0)
    assert costs.image_encode_s(SMALL, 2) == 4.0
    costs.observe_image_encode(LARGE, 1, 3.0)
    assert (costs.image_encode_s(LARGE), costs.longest_s) == (3.0, 1.5)
    assert costs.image_encode_s(SMALL) == pytest.approx(3.0 / 4**1.1)


def test_the_slowdown_follows_a_general_change_within_twenty_iterations():
    costs = CostModel(
        steps={SMALL: CostCurve({2: 1.0, 4: 1.5})},
        decodes={SMALL: CostCurve({1: 1.0})},
        text_encode_s_by_model={MODEL: 1.0},
    )
    for _ in range(20):
        costs.observe_step(SMALL, 2, 2.0)
    assert costs.step_s(SMALL, 2) == pytest.approx(2.0, rel=0.15)
    assert costs.step_s(SMALL, 4) == pytest.approx(3.0, rel=0.25)  # though it was not measured since
    assert (costs.decode_s(SMALL), costs.text_encode_s(MODEL)) == (costs.slowdown, costs.slowdown)
    for _ in range(100):
        costs.observe_step(SMALL, 2, 1.0)
    assert costs.step_s(SMALL, 2) == pytest.approx(1.0, rel=0.05)
    assert costs.step_s(SMALL, 4) == pytest.approx(1.5, rel=0.25)


def test_a_curve_learns_what_the_slowdown_does_not_explain():
    costs = CostModel(steps={SMALL: CostCurve({2: 1.0, 4: 1.0})})
    for _ in range(300):
        costs.observe_step(SMALL, 2, 1.0)
        costs.observe_step(SMALL, 4, 2.0)
    assert costs.step_s(SMALL, 2) == pytest.approx(1.0, rel=0.1)
    assert costs.step_s(SMALL, 4) == pytest.approx(2.0, rel=0.1)


def test_a_new_count_is_divided_by_the_slowdown():
    costs = CostModel(
        steps={SMALL: CostCurve({2: 1.0, 8: 1.0})}, decodes={SMALL: CostCurve({1: 1.0, 4: 1.0})}, slowdown=2.0
    )
    costs.observe_step(SMALL, 4, 2.0)
    costs.observe_decode(SMALL, 2, 2.0)
    assert (costs.slowdown, costs.step_s(SMALL, 4), costs.decode_s(SMALL, 2)) == (2.0, 2.0, 2.0)


def test_decodes_and_text_encodes_are_learned():
    costs = CostModel()
    costs.observe_decode(SMALL, 2, 0.5)
    costs.observe_decode(SMALL, 2, 0.7)
    costs.observe_text_encode(MODEL, 2, 0.4)
    costs.observe_text_encode(MODEL, 1, 0.4)
    assert costs.decode_s(SMALL, 2) == pytest.approx(0.6)
    assert costs.text_encode_s(MODEL) == pytest.approx(0.204)
    assert costs.longest_s == pytest.approx(0.6)


def test_the_row_limit_is_the_refreshed_knee_bounded_by_memory():
    costs = CostModel(max_rows=8, steps={SMALL: CostCurve({1: 1.0, 2: 1.0, 4: 1.0, 8: 2.0})})
    assert costs.rows_limit(SMALL) == 8
    costs.refresh_knees()
    assert costs.rows_limit(SMALL) == 4
    costs.record_oom(SMALL, 4)
    assert costs.rows_limit(SMALL) == 2
    costs.record_oom(SMALL, 2)
    costs.record_oom(SMALL, 1)
    assert costs.rows_limit(SMALL) == 1


def test_exploration_corrects_a_knee_that_is_too_low():
    batch_key = BatchKey(64, 64, MODEL)
    true_s = {1: 0.010, 2: 0.011, 4: 0.013, 8: 0.018, 16: 0.028, 32: 0.048}
    costs = CostModel(32, {batch_key: CostCurve(true_s | {8: 0.05, 16: 0.1, 32: 0.2})})
    costs.refresh_knees()
    assert costs.rows_limit(batch_key) == 4
    tried = set()
    for _ in range(5000):  # four minutes of a model that takes 50 ms a step
        rows = costs.exploration_limit(batch_key)
        tried.add(rows)
        costs.observe_step(batch_key, rows, CostCurve(dict(true_s)).at(rows))
    assert costs.rows_limit(batch_key) == 32
    assert tried == {4, 8, 16, 32}


def test_exploration_does_not_exceed_the_memory_limit():
    batch_key = BatchKey(64, 64, MODEL)
    costs = CostModel(32, {batch_key: CostCurve({1: 1.0, 2: 1.0, 4: 2.0, 32: 16.0})})
    costs.refresh_knees()
    assert costs.rows_limit(batch_key) == 2
    costs.record_oom(batch_key, 6)
    assert max(costs.exploration_limit(batch_key) for _ in range(1000)) == 3


def test_the_slowdown_decays_without_measurements():
    costs = CostModel(8, {BatchKey(64, 64, MODEL): CostCurve({1: 1.0})}, slowdown=4.0)
    costs.decay_slowdown(-1.0)
    assert costs.slowdown == 4.0
    costs.decay_slowdown(3.0)
    assert costs.slowdown == pytest.approx(1.0 + 3.0 / math.e)
    costs.decay_slowdown(60.0)
    assert costs.slowdown == pytest.approx(1.0)


def test_merge_min_keeps_the_shorter_measurements():
    batch_key = BatchKey(64, 64, MODEL)
    first = CostModel(
        8, {batch_key: CostCurve({1: 1.0, 2: 5.0, 4: 3.0})}, {batch_key: CostCurve({1: 2.0})}, {MODEL: 1.0}
    )
    second = CostModel(8, {batch_key: CostCurve({1: 1.5, 2: 2.0})}, {batch_key: CostCurve({1: 1.0})}, {MODEL: 3.0})
    first.image_encodes, second.image_encodes = {batch_key: CostCurve({1: 2.0})}, {batch_key: CostCurve({1: 1.0})}
    first.merge_min(second)
    assert first.image_encodes[batch_key].points == {1: 1.0}
    assert first.steps[batch_key].points == {1: 1.0, 2: 2.0, 4: 3.0}
    assert first.decodes[batch_key].points == {1: 1.0}
    assert first.text_encode_s_by_model == {MODEL: 1.0}


OTHER = ModelKey("m", "2")


def test_costs_of_another_model_are_added_without_changing_those_of_the_first():
    known, added = CostModel(max_rows=2), CostModel(max_rows=2)
    known.steps[SMALL] = CostCurve({1: 1.0, 2: 1.01})
    key = SMALL._replace(model=OTHER)
    added.steps[key], added.decodes[key] = CostCurve({1: 1.0, 2: 1.99}), CostCurve({1: 0.5})
    added.text_encode_s_by_model[OTHER], added.image_encodes[key] = 0.1, CostCurve({1: 0.7})
    known.add(added)
    assert [known.rows_limit(SMALL), known.rows_limit(key)] == [2, 1]
    assert (known.decode_s(key), known.text_encode_s(OTHER), known.image_encode_s(key)) == (0.5, 0.1, 0.7)
    known.refresh_knees()
    assert known.rows_limit(SMALL) == 2


def test_the_costs_of_a_model_are_copied_as_those_of_another():
    costs = CostModel()
    costs.steps = {SMALL: CostCurve({1: 1.0}), SMALL._replace(model=ModelKey("else")): CostCurve({1: 9.0})}
    costs.decodes = {SMALL: CostCurve({1: 0.5})}
    copied = costs.copy_as(MODEL, OTHER)
    key = SMALL._replace(model=OTHER)
    assert {each: curve.points for each, curve in copied.steps.items()} == {key: {1: 1.0}}
    assert (copied.decode_s(key), copied.text_encode_s_by_model) == (0.5, {})
    costs.text_encode_s_by_model, costs.image_encodes = {MODEL: 0.1}, {SMALL: CostCurve({1: 0.7})}
    assert costs.copy_as(MODEL, OTHER).text_encode_s(OTHER) == 0.1
    assert costs.copy_as(MODEL, OTHER).image_encode_s(key) == 0.7
    copied.observe_step(key, 1, 2.0)
    assert costs.step_s(SMALL, 1) == 1.0


def test_estimates_yield_to_measurements_sooner_than_costs_do_and_decide_no_knee():
    costs = CostModel(max_rows=2)
    costs.steps[SMALL], costs.decodes[SMALL] = CostCurve({1: 4.0, 2: 7.99}), CostCurve({1: 1.0})
    costs.image_encodes[SMALL] = CostCurve({1: 3.0})
    estimates = costs.as_estimates()
    assert estimates.image_encode_s(SMALL) == 3.0
    for model in (costs, estimates):
        model.refresh_knees()
        for _ in range(9):
            model.observe_decode(SMALL, 1, 0.5)
    assert (costs.rows_limit(SMALL), estimates.rows_limit(SMALL)) == (1, 2)
    assert costs.decode_s(SMALL) > 0.9
    assert estimates.decode_s(SMALL) == pytest.approx(0.55)


def test_a_forgotten_model_leaves_nothing_and_the_others_stay():
    costs, key = CostModel(), SMALL._replace(model=OTHER)
    for batch_key in (SMALL, key):
        costs.steps[batch_key] = costs.decodes[batch_key] = costs.image_encodes[batch_key] = CostCurve({1: 1.0})
        costs.exploration_limit(batch_key)
        costs.record_oom(batch_key, 4)
        costs.text_encode_s_by_model[batch_key.model] = 1.0
    costs.refresh_knees()
    costs.forget(OTHER)
    assert (costs.step_s(key, 1), costs.decode_s(key), costs.text_encode_s(OTHER)) == (0.0, 0.0, 0.0)
    assert costs.image_encodes.keys() == {SMALL}
    assert (costs.rows_limit(key), costs.rows_limit(SMALL), costs.step_s(SMALL, 1)) == (64, 2, 1.0)
    costs.forget(OTHER)
