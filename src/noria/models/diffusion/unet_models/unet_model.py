"""What Stable Diffusion and XL share: a UNet that denoises latents, and the VAE between them and pixels.

Shapes: B images, C latent channels, H × W latent size.
"""

from typing import Any

import numpy as np
import torch

from noria.config import EngineConfig
from noria.models.diffusion.diffusion_model import InpaintingInput
from noria.models.diffusion.part_loading import unquantized_dtype
from noria.models.diffusion.unet_models.controlnet import ControlNets
from noria.models.diffusion.unet_models.unet import DenoisingUnet
from noria.models.diffusion.vae import LatentDistribution, LatentVae
from noria.sampling.guidance import Guidance
from noria.sampling.schedule import DEFAULT_SCHEDULE, Schedule


class UnetModel:
    """The part of a `DiffusionModel` that does not depend on how prompts condition the UNet."""

    def __init__(
        self,
        unet: Any,
        vae: Any,
        controlnets: ControlNets,
        scheduler_config: dict[str, Any],
        config: EngineConfig,
        guidance: Guidance,
    ) -> None:
        """Configure loaded parts by `config`, which has no "auto" left; device and dtype are those of the UNet."""
        self.controlnets = controlnets
        self.unet, self.scheduler_config, self.guidance = unet, scheduler_config, guidance
        self.device: torch.device = unet.device
        self.dtype = self.noise_dtype = unquantized_dtype(unet)
        self._denoiser = DenoisingUnet(unet, scheduler_config, config)
        self._vae = LatentVae(vae, config)
        self.latent_scale, self.preview_colours = self._vae.scale, self._vae.fit_preview_colours()
        self._latent_channels: int = unet.config.out_channels
        is_for_inpainting = unet.config.in_channels != self._latent_channels
        self.inpainting = InpaintingInput(1, mask_is_first=True, always_has_start=False) if is_for_inpainting else None

    def latent_shape(self, width_px: int, height_px: int) -> tuple[int, int, int]:
        """Return [C, H, W] of the latents of an image of this size."""
        return self._latent_channels, height_px // self.latent_scale, width_px // self.latent_scale

    def call_size(self, num_pixels: int) -> None:  # noqa: ARG002
        """Return None: a UNet takes images of one size at a time."""
        return

    def schedule(self, width_px: int, height_px: int, num_steps: int) -> Schedule:  # noqa: ARG002
        """Return the scheduler's own times, whatever the size."""
        return DEFAULT_SCHEDULE

    def clean_weights(self, timesteps_B: np.ndarray) -> np.ndarray:
        """Return the weights of input and output in a preview."""
        return self._denoiser.clean_weights(timesteps_B)

    def encode(self, pixels_BHW3: torch.Tensor) -> LatentDistribution:
        """Return the latents of start images, pixels [B, height, width, 3], 0 to 255."""
        return self._vae.encode(pixels_BHW3)

    def decode(self, latents_BCHW: torch.Tensor) -> torch.Tensor:
        """Return pixels [B, height, width, 3], uint8."""
        return self._vae.decode(latents_BCHW)
