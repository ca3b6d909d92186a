"""The interface of a loaded diffusion model, as the executor uses it.

Shapes: B images or prompts, R UNet rows (two for a guided image), C latent channels, H × W latent size.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from noria.sampling.schedule import Schedule

Conditioning = Mapping[str, torch.Tensor]
"""What a model is conditioned on: tensors by name, each with one row per prompt, or per UNet row in a model call."""


class TensorSpec(NamedTuple):
    """One row of a tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class DiffusionModel(Protocol):
    """A loaded diffusion model."""

    device: torch.device
    dtype: torch.dtype
    conditioning_specs: Mapping[str, TensorSpec]  # for each name, the rows of its tensor
    scheduler_config: dict[str, Any]
    alpha_bars: np.ndarray  # ᾱ of each training timestep
    prediction_type: str  # diffusers' name for what the UNet predicts
    preview_colours: torch.Tensor  # see `fit_colours` in `sampling/previews.py`; on the device

    def latent_shape(self, width_px: int, height_px: int) -> tuple[int, int, int]:
        """Return [C, H, W] of the latents of an image of this size."""
        ...

    def schedule(self, width_px: int, height_px: int, num_steps: int) -> Schedule:
        """Return how the model's pipeline sets the times of the steps of an image of this size."""
        ...

    def text_encode(self, prompts: list[str]) -> Conditioning:
        """Return the conditioning of B prompts: every name of `conditioning_specs`, with B rows."""
        ...

    def predict(
        self, latents_RCHW: torch.Tensor, timesteps_R: torch.Tensor, conditioning: Conditioning
    ) -> torch.Tensor:
        """Return the UNet's raw output [R, C, H, W]."""
        ...

    def decode(self, latents_BCHW: torch.Tensor) -> torch.Tensor:
        """Return pixels [B, height, width, 3], uint8."""
        ...
