"""The interface of a loaded diffusion model, as the executor uses it.

Shapes: B images or prompts, R UNet rows (two for a guided image), C latent channels, H × W latent size, M channels of a
mask.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from noria.models.diffusion.conditioning import Conditioning, ConditioningRows, ReferenceTokens
from noria.models.diffusion.ip_adapter import IpAdapters
from noria.models.diffusion.unet_models.controlnet import ControlNets, ControlRows
from noria.models.diffusion.unet_models.refiner import Refiner
from noria.models.diffusion.vae import LatentDistribution
from noria.sampling.guidance import Guidance
from noria.sampling.schedule import Schedule

LatentRows = torch.Tensor | list[torch.Tensor]
"""[R, C, H, W], or R times [C, H, W] of several sizes."""


@dataclass(frozen=True, slots=True)
class InpaintingInput:
    """The denoiser's inputs after the latents in a model for inpainting: a mask, and the latents of what it keeps."""

    mask_channels: int  # 1: of each latent the pixel at its top left; more: all pixels of its block, row by row
    mask_is_first: bool
    always_has_start: bool  # whether its pipeline draws for the start image also where noise replaces all of it

    def join(self, mask_MHW: torch.Tensor, kept_CHW: torch.Tensor) -> torch.Tensor:
        """Return [M + C, H, W]; in the mask 1 is repainted."""
        return torch.cat([mask_MHW, kept_CHW] if self.mask_is_first else [kept_CHW, mask_MHW])


class Denoiser(Protocol):
    """The part that makes the calls for an image: a model or, for the last ones, its refiner."""

    device: torch.device
    dtype: torch.dtype
    guidance: Guidance
    scheduler_config: dict[str, Any]

    def text_encode(self, prompts: Sequence[str | None]) -> list[Conditioning]:
        """Return the conditioning of each prompt; None, if `guidance` makes it of an absent one, is zeros."""

    def predict(
        self,
        latents_R: LatentRows,
        timesteps_R: torch.Tensor,
        conditioning: ConditioningRows,
        guidance_R: torch.Tensor | None,
    ) -> LatentRows:
        """Return the denoiser's output for each row, of the latents' shape, as the model's scheduler takes it.

        Rows come as a list only to a model whose calls mix sizes; `guidance_R` are the scales of a model that embeds
        them.
        """

    def clean_weights(self, timesteps_B: np.ndarray) -> np.ndarray:
        """Return [2, B] float32: a preview is the first times the model's input plus the second times its output."""


class DiffusionModel(Denoiser, Protocol):
    """A loaded diffusion model."""

    network: torch.nn.Module  # the denoiser of diffusers
    noise_dtype: torch.dtype  # in which its pipeline draws the start of an image
    lora_parts: Mapping[str, torch.nn.Module]  # what LoRA files can change, by diffusers' names; the denoiser first
    inpainting: InpaintingInput | None  # inputs of a model for inpainting
    preview_colours: torch.Tensor  # see `fit_colours` in `sampling/previews.py`; on the device

    def latent_shape(self, width_px: int, height_px: int) -> tuple[int, int, int]:
        """Return [C, H, W] of the latents of an image of this size."""

    def call_size(self, num_pixels: int) -> tuple[int, int] | None:
        """Return what images of other sizes need to have in common with one of so many pixels to share its calls.

        Those of its references count, too. None: they cannot.
        """

    def schedule(self, width_px: int, height_px: int, num_steps: int) -> Schedule:
        """Return how the model's pipeline sets the times of the steps of an image of this size."""

    def encode(self, pixels_BHW3: torch.Tensor) -> LatentDistribution:
        """Return the latents of start images, pixels [B, height, width, 3], 0 to 255."""

    def decode(self, latents_BCHW: torch.Tensor) -> torch.Tensor:
        """Return pixels [B, height, width, 3], uint8."""


@runtime_checkable
class RefinedModel(DiffusionModel, Protocol):
    """A model that a refiner can follow."""

    refiner: Refiner | None  # None: it has none


@runtime_checkable
class ControlledModel(DiffusionModel, Protocol):
    """A model that ControlNets can steer."""

    controlnets: ControlNets
    latent_scale: int  # pixels per latent along one side

    def predict(
        self,
        latents_R: LatentRows,
        timesteps_R: torch.Tensor,
        conditioning: ConditioningRows,
        guidance_R: torch.Tensor | None,
        controls: Sequence[ControlRows] = (),
    ) -> LatentRows:
        """Return what `DiffusionModel.predict` does; `controls` are the rows that ControlNets steer."""


@runtime_checkable
class ImagePromptedModel(DiffusionModel, Protocol):
    """A model whose prompts IP-Adapters extend by an image."""

    ip_adapters: IpAdapters


@runtime_checkable
class ReferencedModel(DiffusionModel, Protocol):
    """A model that can be shown reference images."""

    def encode_references(self, pixels: Sequence[torch.Tensor]) -> ReferenceTokens:
        """Return the tokens of a request's reference images, in order; pixels are each [height, width, 3] uint8."""

    def predict(
        self,
        latents_R: LatentRows,
        timesteps_R: torch.Tensor,
        conditioning: ConditioningRows,
        guidance_R: torch.Tensor | None,
        references: Sequence[ReferenceTokens | None] = (),
    ) -> LatentRows:
        """Return what `DiffusionModel.predict` does; `references` are those of each row, () if no row has any."""
