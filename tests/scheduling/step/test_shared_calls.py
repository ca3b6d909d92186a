"""Sizes of images share calls where the model mixes them and that pays."""

import pytest

from noria.protocol.model_spec import ModelKey
from noria.scheduling.costs import CostCurve, CostModel
from noria.scheduling.step.scheduler import StepScheduler
from noria.scheduling.step.shared_calls import share_calls
from noria.scheduling.types import BatchKey, IterationResult, MeasuredTimings, SchedulableRequest

SMALL, WIDE, LARGE = BatchKey(512, 512), BatchKey(1216, 832), BatchKey(1024, 1024)
ANY_SIZE = BatchKey(0, 0)
PER_ROW = {LARGE: CostCurve({1: 1.0, 2: 2.0, 8: 8.0})}  # seconds: a device that one large row keeps busy
PER_CALL = {LARGE: CostCurve({1: 1.0, 2: 1.0, 8: 1.0})}  # one that most rows leave idle


def share(rows, steps, call_keys=None, max_rows=64):
    return share_calls(rows, call_keys or dict.fromkeys(rows, ANY_SIZE), CostModel(max_rows, dict(steps)))


def test_sizes_share_calls_that_cost_no_more_with_them():
    assert share({SMALL: 1, LARGE: 1}, PER_CALL) == {SMALL: LARGE, LARGE: LARGE}
    assert share({SMALL: 3, LARGE: 2, WIDE: 1}, {}) == dict.fromkeys((SMALL, LARGE, WIDE), LARGE)  # nothing is known


def test_a_small_image_does_not_pay_for_the_padding_of_a_large_one():
    assert share({SMALL: 1, LARGE: 1}, PER_ROW) == {SMALL: SMALL, LARGE: LARGE}


def test_nearly_equal_sizes_share_calls_and_smaller_ones_have_their_own():
    smaller = BatchKey(448, 576)
    costs = PER_ROW | {key: CostCurve({1: 0.22, 4: 0.3}) for key in (SMALL, smaller)}
    costs |= {WIDE: CostCurve({1: 0.99, 2: 1.9})}
    found = share({WIDE: 1, SMALL: 1, LARGE: 1, smaller: 2}, {**costs, LARGE: CostCurve({1: 1.0, 2: 1.9, 8: 6.0})})
    assert found == {LARGE: LARGE, WIDE: LARGE, SMALL: SMALL, smaller: SMALL}


def test_other_models_and_full_calls_are_not_shared():
    other = LARGE._replace(model=ModelKey("other"))
    call_keys = {SMALL: ANY_SIZE, other: ANY_SIZE._replace(model=other.model)}
    assert share({SMALL: 1, other: 1}, {}, call_keys) == {SMALL: SMALL, other: other}
    assert share({SMALL: 1, LARGE: 2}, PER_CALL, max_rows=2) == {SMALL: SMALL, LARGE: LARGE}


def make_scheduler(steps, call_size=(0, 0), calls=10):
    curves = {key: CostCurve(dict(curve.points)) for key, curve in steps.items()}  # which it changes
    scheduler = StepScheduler(8, costs=CostModel(steps=curves))
    for name, key in (("small", SMALL), ("large", LARGE)):
        scheduler.submit(SchedulableRequest(name, key, 1, calls, None, rows=2, call_size=call_size), 0.0)
    return scheduler


def names(plan):
    return {step.image.attempt_id for step in plan.steps}


def iterate(scheduler, step_s=1.0, **result):
    plan = scheduler.plan(0.0)
    scheduler.commit(
        plan, IterationResult(**{"phase_timings": MeasuredTimings({"steps": step_s})} | result), 0.0, step_s
    )
    return plan


def test_one_call_steps_all_sizes_and_is_a_measurement_of_the_largest():
    scheduler = make_scheduler(PER_CALL)
    assert names(iterate(scheduler)) == {"small", "large"}
    assert scheduler.costs.steps[LARGE].points.keys() == {1, 2, 4, 8}
    assert SMALL not in scheduler.costs.steps


@pytest.mark.parametrize(("steps", "call_size"), [(PER_ROW, (0, 0)), (PER_CALL, None)])
def test_sizes_take_turns_where_calls_are_not_shared(steps, call_size):
    scheduler = make_scheduler(steps, call_size)
    plans = [iterate(scheduler) for _ in range(8)]
    assert {frozenset(names(plan)) for plan in plans} == {frozenset({"small"}), frozenset({"large"})}


def test_sizes_that_do_not_fit_the_memory_together_take_turns():
    scheduler = make_scheduler(PER_CALL)
    assert names(iterate(scheduler, oom_phase="steps")) == {"small", "large"}
    assert scheduler.costs.rows_limit(LARGE) == 2
    plans = [iterate(scheduler) for _ in range(4)]
    assert {frozenset(names(plan)) for plan in plans} == {frozenset({"small"}), frozenset({"large"})}


def test_a_small_image_that_rides_in_large_calls_is_as_urgent_as_they_are_long():
    scheduler = make_scheduler(PER_CALL | {SMALL: CostCurve({1: 0.25, 2: 0.25})}, calls=100)
    expected = [scheduler._predictor._image_costs(SMALL, 2)]
    for _ in range(60):
        assert names(iterate(scheduler)) == {"small", "large"}
    expected.append(scheduler._predictor._image_costs(SMALL, 2))
    assert [(each.expected_call_s, each.min_call_s) for each in expected] == [(0.25, 0.25), (1.0, 0.25)]
    scheduler.cancel("large", 0.0)
    iterate(scheduler, step_s=0.25)
    assert scheduler._predictor._image_costs(SMALL, 2).expected_call_s < 0.5


SHOWN = LARGE._replace(reference_px=1024 * 1024)  # with a reference image of its size


def test_references_count_as_pixels_of_a_row():
    costs = PER_CALL | {SHOWN: CostCurve({1: 1.0, 2: 1.0, 8: 1.0})}
    assert share({LARGE: 1, SHOWN: 1}, costs) == {LARGE: SHOWN, SHOWN: SHOWN}
    learned = CostModel(steps={LARGE: CostCurve({1: 1.0})})
    assert 2.0 < learned.step_s(SHOWN, 1) < 2.5, "an unknown one costs as much as an image of as many pixels"


def test_images_of_one_size_are_decoded_together_whatever_their_references():
    scheduler = StepScheduler(8)
    for name, key in (("plain", LARGE), ("shown", SHOWN)):
        scheduler.submit(SchedulableRequest(name, key, 1, 1, None, call_size=(0, 0)), 0.0)
    plan = scheduler.plan(0.0)
    assert {each.image.attempt_id for each in plan.decodes} == {"plain", "shown"}
    scheduler.commit(plan, IterationResult(phase_timings=MeasuredTimings({"steps": 1.0, "decodes": 0.5})), 0.0, 1.5)
    assert scheduler.costs.decodes.keys() == {LARGE}
    assert scheduler.costs.decode_s(SHOWN, 2) == scheduler.costs.decode_s(LARGE, 2) > 0


@pytest.mark.parametrize(("num_references", "expected"), [(0, 4), (1, 4), (2, 2), (3, 1), (9, 1)])
def test_an_iteration_encodes_few_references(num_references, expected):
    key = LARGE._replace(reference_px=num_references * 1024 * 1024)
    scheduler = StepScheduler(16, decode_batch=4)
    for k in range(9):
        scheduler.submit(SchedulableRequest(f"r{k}", key, 1, 5, None, has_start_image=True), 0.0)
    assert len(scheduler.plan(0.0).encodes) == expected


def test_the_stages_of_a_model_share_no_call_beside_a_model_that_mixes_sizes():
    scheduler, mixing = StepScheduler(8), LARGE._replace(model=ModelKey("mixing"))
    scheduler.submit(SchedulableRequest("mixing", mixing, 1, 9, None, call_size=(0, 0)), 0.0)
    scheduler.submit(SchedulableRequest("refined", LARGE, 1, 4, None, second_stage_from=1), 0.0)
    scheduler.submit(SchedulableRequest("plain", LARGE, 1, 4, None), 0.0)
    stepped = [{(step.image.attempt_id, step.call) for step in iterate(scheduler).steps} for _ in range(12)]
    assert {("refined", 0), ("plain", 0)} in stepped
    assert all(len({name for name, _ in each}) == 1 for each in stepped if ("refined", 0) not in each)
