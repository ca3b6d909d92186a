"""Slots of the running batch."""

from noria.scheduling.step.slots import Slots


def test_acquire_returns_the_lowest_free_slot():
    slots = Slots(3)
    assert [slots.acquire(), slots.acquire(), slots.acquire()] == [0, 1, 2]
    slots.release(2)
    slots.release(0)
    assert slots.num_free == 2
    assert slots.acquire() == 0
