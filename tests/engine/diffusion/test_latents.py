"""Histories are as wide as the images in them need, and unused ones are bounded by bytes."""

import pytest
import torch

from noria.engine.diffusion.latents import LatentSlots
from noria.scheduling.types import BatchKey

SHAPE = (2, 4, 4)
KEYS = [BatchKey(8 * k, 8) for k in range(1, 5)]
NARROW_BYTES = 3 * 3 * 32 * 4  # three slots, three columns, 32 float32


def make_slots(max_idle_bytes=0):
    return LatentSlots(3, torch.device("cpu"), max_idle_bytes)


def test_a_history_is_as_wide_as_its_widest_table():
    slots = make_slots()
    shapes = [tuple(slots.join(KEYS[0], SHAPE, window, set()).shape) for window in (1, 2, 1, 3)]
    assert shapes == [(3, 3, 32), (3, 5, 32), (3, 5, 32), (3, 9, 32)]


def test_an_image_keeps_its_samples_when_the_history_becomes_wider():
    slots = make_slots()
    slots.join(KEYS[0], SHAPE, 1, set())[1, 0] = 7.0
    assert slots.join(KEYS[0], SHAPE, 4, {KEYS[0]})[1, :4].eq(7.0).all()
    assert slots[KEYS[0]].shape == (3, 9, 32)


@pytest.mark.parametrize(("max_histories", "kept"), [(0, 1), (1, 2), (2, 3)])
def test_unused_histories_are_kept_up_to_a_number_of_bytes(max_histories, kept):
    slots = make_slots(max_histories * NARROW_BYTES)
    for key in KEYS:
        slots.join(key, SHAPE, 1, set())
    assert list(slots._histories) == KEYS[-kept:]


def test_histories_in_use_are_never_freed():
    slots = make_slots()
    for key in KEYS:
        slots.join(key, SHAPE, 1, set(KEYS[:2]))
    assert list(slots._histories) == [*KEYS[:2], KEYS[-1]]
