"""The base of diffusion models, whatever their denoiser: the VAE, and the sizes of its latents.

Shapes: B images, C latent channels, H × W latent size.
"""

from typing import Any, ClassVar

import torch

from noria.config import EngineConfig
from noria.models.diffusion.diffusion_model import InpaintingInput
from noria.models.diffusion.part_loading import unquantized_dtype
from noria.models.diffusion.vae import LatentDistribution, LatentVae
from noria.sampling.guidance import Guidance
from noria.sampling.schedule import DEFAULT_SCHEDULE, Schedule


class LatentModel:
    """The part of a `DiffusionModel` that depends neither on its denoiser nor on how prompts condition that."""

    vae_class: ClassVar[type[LatentVae]] = LatentVae
    inpainting: InpaintingInput | None = None

    def __init__(
        self,
        denoiser: Any,
        vae: Any,
        scheduler_config: dict[str, Any],
        config: EngineConfig,
        guidance: Guidance,
        latent_channels: int,
    ) -> None:
        """`config` has no "auto" left; device and dtype are those of the denoiser."""
        self.scheduler_config, self.guidance = scheduler_config, guidance
        self.network: torch.nn.Module = denoiser
        self.device: torch.device = denoiser.device
        self.dtype = self.noise_dtype = unquantized_dtype(denoiser)
        self._latent_channels = latent_channels
        self._vae = self.vae_class(vae, config)
        self.latent_scale, self.preview_colours = self._vae.scale, self._vae.fit_preview_colours()

    def latent_shape(self, width_px: int, height_px: int) -> tuple[int, int, int]:
        """Return [C, H, W] of the latents of an image of this size."""
        return self._latent_channels, height_px // self.latent_scale, width_px // self.latent_scale

    def call_size(self, num_pixels: int) -> tuple[int, int] | None:  # noqa: ARG002
        """Return None: a call takes images of one size."""
        return None

    def schedule(self, width_px: int, height_px: int, num_steps: int) -> Schedule:  # noqa: ARG002
        """Return the scheduler's own times, whatever the size."""
        return DEFAULT_SCHEDULE

    def encode(self, pixels_BHW3: torch.Tensor) -> LatentDistribution:
        """Return the latents of start images, pixels [B, height, width, 3], 0 to 255."""
        return self._vae.encode(pixels_BHW3)

    def decode(self, latents_BCHW: torch.Tensor) -> torch.Tensor:
        """Return pixels [B, height, width, 3], uint8."""
        return self._vae.decode(latents_BCHW)
