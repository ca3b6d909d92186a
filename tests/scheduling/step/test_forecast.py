"""Examples of forecasts; `test_virtual_time.py` checks in virtual time that forecasts come true."""

import math

import pytest

from noria.protocol.model_spec import ModelKey
from noria.scheduling.costs import CostCurve, CostModel
from noria.scheduling.step.forecast import SimulatedImage, forecast, forecast_head
from noria.scheduling.types import BatchKey, ItemId

MODEL = ModelKey("m")

SMALL, LARGE = BatchKey(64, 64, MODEL), BatchKey(128, 64, MODEL)


def costs(max_rows=8, steps=None, decodes=None, text_encode_s=0.0):
    steps, decodes = steps or {1: 1.0, 8: 8.0}, decodes or {1: 0.0}
    batch_keys = (SMALL, LARGE)
    return CostModel(
        max_rows,
        {batch_key: CostCurve(dict(steps)) for batch_key in batch_keys},
        {batch_key: CostCurve(dict(decodes)) for batch_key in batch_keys},
        {MODEL: text_encode_s},
    )


def image(name, calls, batch_key=SMALL, rows=1, running=False, exclusive=False, index=0, **more):
    return SimulatedImage(ItemId(name, index), batch_key, rows, calls, running, exclusive, **more)


def forecast_times(images, num_slots=4, cost_model=None, expected_batch_size=None, decode_batch=4):
    done = forecast(images, num_slots, cost_model or costs(), expected_batch_size or {}, decode_batch)
    return {each.attempt_id: (pytest.approx(at.start_in_s), pytest.approx(at.finish_in_s)) for each, at in done.items()}


def test_one_image_takes_its_text_encode_its_calls_and_its_decode():
    assert forecast_times([image("a", 3)], cost_model=costs(decodes={1: 0.5}, text_encode_s=0.25)) == {"a": (0.0, 3.75)}


def test_start_images_are_encoded_a_few_an_iteration_and_delay_all():
    model = costs(steps={1: 1.0, 8: 1.0})
    model.image_encodes = {SMALL: CostCurve({1: 3.0, 2: 5.0})}
    images = [
        *[image("runs", 2, running=True)],
        *[image(name, 2, needs_encode=name != "t") for name in "abct"],
        image("c", 2, index=1),  # its start image is that of the other one
    ]
    found = forecast_times(images, num_slots=8, cost_model=model, decode_batch=2)
    # Encodes end at 5 and 9 s, and the calls at 6, 10 and 11 s; two images are decoded after each.
    assert found == {"runs": (0.0, 10.0), "a": (0.0, 10.0), "b": (0.0, 11.0), "t": (0.0, 11.0), "c": (6.0, 11.0)}


def test_images_that_share_a_call_take_the_duration_of_the_larger_batch():
    assert forecast_times([image("a", 2), image("b", 4)]) == {"a": (0.0, 4.0), "b": (0.0, 6.0)}


def test_the_next_image_joins_when_a_slot_is_free():
    assert forecast_times([image("a", 2, running=True), image("b", 3)], num_slots=1) == {
        "a": (0.0, 2.0),
        "b": (2.0, 5.0),
    }


def test_images_beyond_the_row_limit_are_paused():
    assert forecast_times([image("a", 2), image("b", 2)], cost_model=costs(max_rows=1)) == {
        "a": (0.0, 2.0),
        "b": (0.0, 4.0),
    }


def test_an_image_ranked_first_pauses_running_images():
    model = costs(max_rows=1)
    images = [image("urgent", 1), image("runs", 5, running=True), image("other", 5, running=True)]
    assert forecast_times(images, num_slots=2, cost_model=model)["urgent"] == (5.0, 6.0)  # no slot is free before
    images = [image("urgent", 1), image("runs", 5, running=True)]
    assert forecast_times(images, num_slots=2, cost_model=model) == {"urgent": (0.0, 1.0), "runs": (0.0, 6.0)}


def test_images_denoised_together_are_decoded_in_batches_one_after_another():
    images = [image(name, 1) for name in "abc"] + [image("runner", 9)]
    done = forecast_times(images, cost_model=costs(steps={1: 1.0, 4: 1.0}, decodes={1: 1.0, 2: 1.5}), decode_batch=2)
    assert [done[name][1] for name in "abc"] == [2.5, 2.5, 4.5]  # a step of "runner" lies between


def test_an_image_with_only_its_decode_left():
    assert forecast_times([image("a", 0, running=True)], cost_model=costs(decodes={1: 0.5})) == {"a": (0.0, 0.5)}


def test_batch_keys_share_the_device_in_proportion_to_running_images():
    images = [image("a", 4), image("b", 4, LARGE), image("c", 4, LARGE)]
    done = forecast_times(images, cost_model=costs(steps={1: 1.0, 8: 1.0}))
    assert done["a"] == (0.0, 8.0)  # a third of the device while all run, then all of it
    assert done["b"] == (0.0, 6.0)


def test_the_expected_batch_size_lengthens_steps_up_to_the_row_limit():
    assert forecast_times([image("a", 2)], expected_batch_size={SMALL: 3.0}) == {"a": (0.0, 6.0)}
    assert forecast_times([image("a", 2)], cost_model=costs(max_rows=2), expected_batch_size={SMALL: 6.0}) == {
        "a": (0.0, 4.0)
    }


@pytest.mark.parametrize(("call_work_s", "pace", "b_finish_s"), [(0.5, 2.0, 8.0), (0.0, 1.0, 4.0)])
def test_the_head_of_a_queue_ends_when_a_slot_is_free_and_the_rest_goes_on_at_its_pace(call_work_s, pace, b_finish_s):
    images = [image(name, calls, call_work_s=call_work_s) for name, calls in (("a", 2), ("b", 4))]
    model = costs()
    found = forecast_head(images, 2, model, {})
    assert {each.attempt_id: at for each, at in found.images.items()} == {"a": (0.0, 4.0), "b": (0.0, b_finish_s)}
    assert (found.end_in_s, found.pace) == (4.0, pace)


def test_unknown_costs_are_zero():
    assert forecast_times([image("a", 9), image("b", 3)], num_slots=1, cost_model=CostModel()) == {
        "a": (0.0, 0.0),
        "b": (0.0, 0.0),
    }


def test_an_exclusive_request_waits_for_an_empty_batch_and_holds_others_back():
    images = [image("runs", 2, running=True)]
    images += [image("suspect", 3, exclusive=True, index=index) for index in range(2)]
    images += [image("after", 1)]
    assert forecast_times(images) == {"runs": (0.0, 2.0), "suspect": (2.0, 8.0), "after": (8.0, 9.0)}


@pytest.mark.parametrize(
    ("num_evictable", "finishes"),
    [(math.inf, (4.0, 6.0, 10.0, 14.0)), (0, (10.0, 12.0, 6.0, 14.0)), (-math.inf, (10.0, 14.0, 6.0, 12.0))],
)
def test_as_many_images_are_evicted_as_can_be_and_one_more_when_another_has_returned(num_evictable, finishes):
    """Of two slots: two images wait that are ahead of those that run, and one of them was evicted."""
    images = [image("evicted", 2, is_begun=True), image("new", 3)]
    images += [
        image(name, calls, running=True, is_begun=True, is_evictable=True) for name, calls in (("a", 3), ("b", 6))
    ]
    done = forecast(images, 2, costs(), {}, num_evictable=num_evictable)
    assert tuple(done[each.image].finish_in_s for each in images) == pytest.approx(finishes)
