"""The noise of one image, drawn as diffusers draws it with one CPU generator per image.

Rule: a draw is a function of (seed, image, index of the draw, dtype) only: not of the batch, the slot, the device or
the load. Draws follow diffusers' order: what samples the latents of a start image, the initial latent, then one at each
call whose table row has `noise`, also if its coefficient is 0, because the draw advances the generator. This module
does not know which calls those are.

Tensor shapes: C channels, H × W latent size, N calls.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from noria.errors import InvalidField

MAX_SEED = 2**63 - 1  # manual_seed takes up to 2**64 - 1: seed + k still fits for every image k


class NoiseStream:
    """The draws of image `image` of a request; the generator's seed is `seed + image`, as is usual with diffusers.

    Raises InvalidField: the seed is out of range.
    """

    def __init__(self, seed: int, shape_CHW: tuple[int, int, int], dtype: torch.dtype, *, image: int = 0) -> None:
        if not 0 <= seed <= MAX_SEED:
            raise InvalidField(f"seed must be from 0 to {MAX_SEED}, got {seed}.", field="seed")
        self._generator = torch.Generator("cpu").manual_seed(seed + image)
        self._shape_CHW = shape_CHW
        self._dtype = dtype
        self._has_initial = False
        self._last: tuple[int, torch.Tensor] | None = None  # the last call and its noise

    def of_start_image(self, dtype: torch.dtype, shape_CHW: tuple[int, ...] | None = None) -> torch.Tensor:
        """Draw [C, H, W] on the CPU, which sample the latents of a start image, of any shape: before `initial`.

        Where there is a mask, diffusers draws once more after `initial`, for the latents of what the mask keeps. Only a
        model for inpainting uses them.
        """
        return torch.randn(shape_CHW or self._shape_CHW, generator=self._generator, dtype=dtype)

    def initial(self) -> torch.Tensor:
        """Draw [C, H, W] of unit variance on the CPU, once, before any `next`.

        The caller applies `init_noise_sigma`.
        """
        if self._has_initial:
            raise RuntimeError("the initial noise can be drawn only once")
        self._has_initial = True
        return self._draw(self._dtype)

    def next(self, dtype: torch.dtype | None = None, *, call: int | None = None) -> torch.Tensor:
        """Draw the next call's [C, H, W] on the CPU, by default in the stream's dtype.

        Repeated for the same `call`, because its first execution failed, it returns the same noise.
        """
        if not self._has_initial:
            raise RuntimeError("the initial noise must be drawn before the noise of a call")
        if call is None:
            return self._draw(dtype or self._dtype)
        if self._last is None or self._last[0] != call:
            self._last = call, self._draw(dtype or self._dtype)
        return self._last[1]

    def replay(self, noise_N: NDArray[np.bool_], dtype: torch.dtype, first_call: int = 0) -> None:
        """Draw what was drawn for the calls from `first_call` to N, for an image that goes on after them.

        `noise_N` is that of the table's first N calls.
        """
        for call in first_call + np.flatnonzero(noise_N[first_call:]):
            self.next(dtype, call=int(call))

    def _draw(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(self._shape_CHW, generator=self._generator, dtype=dtype)
