"""Batch keys of the calls that are left of an image of two stages."""

import pytest

from noria.protocol.model_spec import ModelKey
from noria.scheduling.types import BatchKey, SchedulableRequest

FIRST, LARGE = BatchKey(64, 64, ModelKey("m")), BatchKey(128, 128, ModelKey("m"))
PIXELS = BatchKey(256, 256, ModelKey("upscaler"))


@pytest.mark.parametrize(
    ("call", "stages"),
    [
        (0, ((FIRST, 3), (PIXELS, 2), (LARGE, 4))),
        (2, ((FIRST, 1), (PIXELS, 2), (LARGE, 4))),
        (3, ((PIXELS, 2), (LARGE, 4))),
        (4, ((PIXELS, 1), (LARGE, 4))),
        (5, ((LARGE, 4),)),
        (8, ((LARGE, 1),)),
        (9, ((LARGE, 0),)),
    ],
)
def test_the_stages_that_are_left_begin_with_the_next_call(call, stages):
    request = SchedulableRequest(
        "a", FIRST, 1, 9, None, second_stage_from=5, second_stage_px=(128, 128), between=((PIXELS, 2),)
    )
    assert request.stages_from(call) == stages
    assert request.step_key(call) == stages[0][0]


def test_a_second_stage_without_calls_is_none():
    request = SchedulableRequest("a", FIRST, 1, 5, None, second_stage_from=5, second_stage_px=(128, 128))
    assert [request.stages_from(call) for call in (0, 4, 5)] == [((FIRST, 5),), ((FIRST, 1),), ((LARGE, 0),)]
