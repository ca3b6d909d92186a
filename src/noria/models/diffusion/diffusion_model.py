"""The interface of a loaded diffusion model, as the executor uses it.

Shapes: B images or prompts, R UNet rows (two for a guided image), C latent channels, H × W latent size.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

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
    latent_channels: int
    latent_scale: int  # pixels of a side per latent
    conditioning_specs: Mapping[str, TensorSpec]  # for each name, the rows of its tensor
    scheduler_config: dict[str, Any]
    alpha_bars: np.ndarray  # ᾱ of each training timestep
    prediction_type: str  # diffusers' name for what the UNet predicts
    preview_colours: torch.Tensor  # see `fit_colours` in `sampling/previews.py`; on the device

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
