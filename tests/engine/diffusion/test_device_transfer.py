"""Pixels can be read repeatedly, because a thumbnail is sent in every view to every front end."""

import pytest
import torch

from noria.engine.diffusion.device_transfer import HostPixels
from noria.errors import GenerationFailed


class Copy:
    """The part of a CUDA event that is used."""

    num_waits = 0

    def synchronize(self):
        self.num_waits += 1


def test_pixels_are_the_same_however_often_they_are_read():
    copied = Copy()
    pixels = HostPixels(torch.arange(12, dtype=torch.uint8).reshape(2, 2, 3), torch.tensor(data=True), copied)
    assert bytes(pixels.rgb()) == bytes(pixels.rgb()) == bytes(range(12))
    assert copied.num_waits == 2


def test_latents_that_are_not_finite_raise_each_time():
    pixels = HostPixels(torch.zeros(1, 1, 3, dtype=torch.uint8), torch.tensor(data=False), None)
    for _ in range(2):
        with pytest.raises(GenerationFailed, match="not finite"):
            pixels.rgb()
