"""Stable Diffusion XL on one device, and models distilled from it: two text encoders, a UNet that knows the size.

As `stable_diffusion.py`, without diffusers' pipeline, and with its numbers. What differs:

- Conditioned on tokens of both encoders side by side, from before their last layers, `encoder_hidden_states`
  [rows, T, D1 + D2]; on the second one's pooled output [rows, P]; and on six numbers of the size.
- A negative prompt that is absent is all zeros, if the folder says so (`force_zeros_for_empty_prompt`).
- A UNet with `time_cond_proj_dim`, as that of LCM, takes the guidance scale itself, in one row.
- A VAE with `force_upcast` overflows in float16, and so is in float32 then.

Shapes: B images, R UNet rows, T tokens, C latent channels, H × W latent size.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from noria.config import EngineConfig
from noria.models.diffusion.conditioning import Conditioning, ConditioningRows
from noria.models.diffusion.ip_adapter import load_ip_adapters
from noria.models.diffusion.part_loading import (
    load_denoiser,
    load_pipeline_config,
    load_scheduler_config,
    load_text_encoder,
    load_vae,
    loading,
    make_streamer,
    text_encoder_placement,
)
from noria.models.diffusion.prompts.clip_prompt import PromptText
from noria.models.diffusion.unet_models.clip_encoding import TextEncoder
from noria.models.diffusion.unet_models.controlnet import ControlNets, ControlRows, load_controlnets
from noria.models.diffusion.unet_models.refiner import Refiner, load_refiner
from noria.models.diffusion.unet_models.unet_model import UnetModel
from noria.models.diffusion.unet_models.xl_conditioning import size_ids, text_encode
from noria.protocol.diffusion import DiffusionModelSpec
from noria.sampling.guidance import Guidance


class StableDiffusionXL(UnetModel):
    """The parts of one StableDiffusionXLPipeline folder, ready on a device."""

    def __init__(
        self,
        text_encoders: tuple[TextEncoder, TextEncoder],
        unet: Any,
        vae: Any,
        controlnets: ControlNets,
        scheduler_config: dict[str, Any],
        config: EngineConfig,
        guidance: Guidance,
    ) -> None:
        """Configure loaded parts by `config`, which has no "auto" left; device and dtype are those of the UNet.

        The second text encoder has the pooled output.
        """
        super().__init__(unet, vae, controlnets, scheduler_config, config, guidance)
        first, second = text_encoders
        self.lora_parts: Mapping[str, torch.nn.Module] = {
            "unet": unet,
            "text_encoder": first[1],
            "text_encoder_2": second[1],
        }
        self._text_encoders = text_encoders
        self.refiner: Refiner | None = None

    @classmethod
    def load(cls, spec: DiffusionModelSpec, config: EngineConfig, device: str) -> "StableDiffusionXL":
        """Read the parts of `spec.folder` onto `device`.

        Raises ModelError: diffusers or transformers cannot read a part; the message contains their reason.
        """
        placement, streamer = text_encoder_placement(config, device), make_streamer(config, device)
        with loading(spec):
            from diffusers import UNet2DConditionModel
            from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

            first = load_text_encoder((CLIPTokenizer, CLIPTextModel), spec, "", *placement, streamer)
            second = load_text_encoder((CLIPTokenizer, CLIPTextModelWithProjection), spec, "_2", *placement, streamer)
            unet = load_denoiser(UNet2DConditionModel, spec, config, device, streamer)
            vae = load_vae(spec, config, device, streamer, may_overflow=True)
            zeros = load_pipeline_config(spec).get("force_zeros_for_empty_prompt", True)
            guidance = Guidance(
                rescale=spec.guidance_rescale,
                embedded=unet.config.time_cond_proj_dim is not None,
                negative_absent="zeros" if zeros else "empty",
            )
            controlnets = load_controlnets(spec, config, device)
            ip_adapters = load_ip_adapters(spec, unet, config, device)
            model = cls((first, second), unet, vae, controlnets, load_scheduler_config(spec), config, guidance)
            model.ip_adapters = ip_adapters
            model.refiner = load_refiner(spec, config, device, model.latent_scale, second[1])
            return model

    def text_encode(self, prompts: Sequence[PromptText]) -> list[Conditioning]:
        """Return the conditioning of each prompt, as `xl_conditioning.py` makes it; of None it is zeros."""
        return text_encode(self._text_encoders, prompts, self.device, self.dtype)

    def predict(
        self,
        latents_RCHW: torch.Tensor,
        timesteps_R: torch.Tensor,
        conditioning: ConditioningRows,
        guidance_R: torch.Tensor | None,
        controls: Sequence[ControlRows] = (),
    ) -> torch.Tensor:
        """Return the UNet's raw output [R, C, H, W]; `controls` are the rows that ControlNets steer."""
        num_rows, _, height, width = latents_RCHW.shape
        size_6 = size_ids(width * self.latent_scale, height * self.latent_scale, self.dtype, self.device)
        added = {"text_embeds": conditioning.vectors["text_embeds"], "time_ids": size_6.expand(num_rows, -1)}
        residuals = self.controlnets.residuals(latents_RCHW, timesteps_R, conditioning, controls, added)
        return self._denoiser.predict(
            latents_RCHW, timesteps_R, conditioning, guidance_R, added_cond_kwargs=added, **residuals
        )
