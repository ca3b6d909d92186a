"""One image's randomness, drawn as diffusers draws it with one CPU generator per image.

Rule: a draw is a function of (seed, image, index of the draw, dtype) and of nothing else: not of the batch, the slot, the device or
the load. Draws come in diffusers' order: the initial latent first, then one at each call whose row of the table says so, also where
its coefficient is 0, since it moves the generator on. This module does not know which call that is.

Tensor shapes: C channels, H and W of the latent.
"""

import torch

from noria.errors import InvalidField

MAX_SEED = 2**63 - 1  # manual_seed takes up to 2**64 - 1: seed + k still fits for every image k


class NoiseStream:
    """The draws of image `image` of a request: its generator is seeded with `seed + image`, as diffusers' users do."""

    def __init__(self, seed: int, shape_CHW: tuple[int, int, int], dtype: torch.dtype, *, image: int = 0) -> None:
        if not 0 <= seed <= MAX_SEED:
            raise InvalidField(f"seed must be from 0 to {MAX_SEED}, got {seed}.", field="seed")
        self._generator = torch.Generator("cpu").manual_seed(seed + image)
        self._shape_CHW = shape_CHW
        self._dtype = dtype
        self._num_draws = 0
        self._last: tuple[int, torch.Tensor] | None = None  # a call and its noise

    def initial(self) -> torch.Tensor:
        """[C, H, W] of unit variance on the CPU; `init_noise_sigma` is the caller's to apply. Once, before any `next`."""
        if self._num_draws:
            raise RuntimeError("the initial noise is the first draw of a stream, and is drawn once")
        return self._draw(self._dtype)

    def next(self, dtype: torch.dtype | None = None, *, call: int | None = None) -> torch.Tensor:
        """The next call's [C, H, W] on the CPU, in the stream's dtype or in the one that the table's `noise_dtype` names.

        Asked once more for the same `call`, because the first try came to nothing, it gives the same noise.
        """
        if not self._num_draws:
            raise RuntimeError("the initial noise is drawn before the noise of a call")
        if call is None:
            return self._draw(dtype or self._dtype)
        if self._last is None or self._last[0] != call:
            self._last = call, self._draw(dtype or self._dtype)
        return self._last[1]

    def _draw(self, dtype: torch.dtype) -> torch.Tensor:
        self._num_draws += 1
        return torch.randn(self._shape_CHW, generator=self._generator, dtype=dtype)
