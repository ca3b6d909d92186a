"""The history is as wide and as large as the images in it need, and one for all sizes."""

import pytest
import torch

from noria.engine.diffusion.latents import LatentSlots

SHAPE, LARGE = (2, 4, 4), (2, 8, 4)
NARROW_BYTES = 3 * 3 * 32 * 4  # three slots, three columns, 32 float32


def make_slots(max_idle_bytes=0):
    return LatentSlots(3, torch.device("cpu"), max_idle_bytes)


def test_the_history_is_as_wide_as_its_widest_table():
    slots = make_slots()
    shapes = [tuple(slots.join(SHAPE, window, 2, is_first=False).shape) for window in (1, 2, 1, 3)]
    assert shapes == [(3, 3, 32), (3, 5, 32), (3, 5, 32), (3, 9, 32)]


def test_images_keep_their_samples_when_the_history_becomes_wider_and_larger():
    slots = make_slots()
    slots.join(SHAPE, 1, 1, is_first=True)[1, 0] = 7.0
    large = slots.join(LARGE, 4, 2, is_first=False)
    assert large.shape == (3, 9, 64)
    assert slots.of(SHAPE).shape == (3, 9, 32)
    assert slots.of(SHAPE)[1, :4].eq(7.0).all()
    large[2] = 3.0
    assert slots.of(SHAPE)[1, :4].eq(7.0).all()


def test_any_number_of_sizes_takes_the_memory_of_the_largest():
    slots = make_slots()
    for num_rows in range(1, 33):
        slots.join((2, num_rows, 4), 1, 2, is_first=num_rows == 1)
    assert slots.nbytes == 3 * 3 * (2 * 32 * 4) * 4


@pytest.mark.parametrize(("max_idle_bytes", "kept"), [(2 * NARROW_BYTES - 1, 1), (2 * NARROW_BYTES, 2)])
def test_an_unused_history_is_kept_up_to_a_number_of_bytes(max_idle_bytes, kept):
    slots = make_slots(max_idle_bytes)
    slots.join(LARGE, 1, 2, is_first=True)
    slots.join(SHAPE, 1, 0, is_first=False)
    assert slots.nbytes == 2 * NARROW_BYTES
    slots.join(SHAPE, 1, 2, is_first=True)
    assert slots.nbytes == kept * NARROW_BYTES


def test_slots_that_are_not_used_take_no_memory():
    slots = LatentSlots(100, torch.device("cpu"))
    shapes = []
    for slot in (0, 1, 2, 3, 4, 70, 99):
        history = slots.join(SHAPE, 1, slot, is_first=False)
        assert history[slot].eq(0.0).all()
        history[slot] = slot + 1.0
        shapes.append(history.shape[0])
    assert shapes == [1, 2, 4, 4, 8, 71, 100]
    assert [float(slots.of(SHAPE)[slot, 0, 0]) for slot in (0, 1, 2, 3, 4, 70, 99)] == [1, 2, 3, 4, 5, 71, 100]
