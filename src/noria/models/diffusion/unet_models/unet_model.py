"""The base of Stable Diffusion and XL: a UNet that denoises latents, and ControlNets and IP-Adapters that steer it.

Shapes: B images.
"""

from typing import Any

import numpy as np

from noria.config import EngineConfig
from noria.models.diffusion.diffusion_model import InpaintingInput
from noria.models.diffusion.ip_adapter import IpAdapters
from noria.models.diffusion.latent_model import LatentModel
from noria.models.diffusion.unet_models.controlnet import ControlNets
from noria.models.diffusion.unet_models.unet import DenoisingUnet
from noria.sampling.guidance import Guidance


class UnetModel(LatentModel):
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
        self.unet, self.controlnets = unet, controlnets
        self.ip_adapters = IpAdapters({}, unet, has_compiled_blocks=False)
        self._denoiser = DenoisingUnet(unet, scheduler_config, config)
        super().__init__(unet, vae, scheduler_config, config, guidance, unet.config.out_channels)
        if unet.config.in_channels != unet.config.out_channels:
            self.inpainting = InpaintingInput(1, mask_is_first=True, always_has_start=False)

    def clean_weights(self, timesteps_B: np.ndarray) -> np.ndarray:
        """Return the weights of input and output in a preview."""
        return self._denoiser.clean_weights(timesteps_B)
