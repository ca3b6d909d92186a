"""Stable Diffusion 1.x and 2.x on one device: prompts to embeddings, one UNet call, latents to pixels.

Loads the parts of a folder in diffusers format without diffusers' pipeline: `engine/diffusion/executor.py` replaces the
pipeline's loop, for many requests at once. Knows nothing of requests or slots.

Conditioned on one tensor of tokens, by the name of the UNet's argument: `encoder_hidden_states` [rows, T, D].

Shapes: B images, R UNet rows (two for a guided image), T tokens, D text width, C latent channels, H × W latent size.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from noria.config import EngineConfig
from noria.models.diffusion.conditioning import Conditioning, ConditioningRows
from noria.models.diffusion.ip_adapter import load_ip_adapters
from noria.models.diffusion.part_loading import (
    load_denoiser,
    load_scheduler_config,
    load_text_encoder,
    load_vae,
    loading,
    make_streamer,
    text_encoder_placement,
)
from noria.models.diffusion.prompts.clip_prompt import PromptText
from noria.models.diffusion.unet_models.clip_encoding import clip_encode
from noria.models.diffusion.unet_models.controlnet import ControlNets, ControlRows, load_controlnets
from noria.models.diffusion.unet_models.unet_model import UnetModel
from noria.protocol.diffusion import DiffusionModelSpec
from noria.sampling.guidance import Guidance


class StableDiffusion(UnetModel):
    """The four parts of one StableDiffusionPipeline folder, ready on a device."""

    def __init__(
        self,
        tokenizer: Any,
        text_encoder: Any,
        unet: Any,
        vae: Any,
        controlnets: ControlNets,
        scheduler_config: dict[str, Any],
        config: EngineConfig,
        guidance: Guidance,
    ) -> None:
        """Configure loaded parts by `config`, which has no "auto" left; device and dtype are those of the UNet."""
        super().__init__(unet, vae, controlnets, scheduler_config, config, guidance)
        self.tokenizer, self.text_encoder = tokenizer, text_encoder
        self.lora_parts: Mapping[str, torch.nn.Module] = {"unet": unet, "text_encoder": text_encoder}

    @classmethod
    def load(cls, spec: DiffusionModelSpec, config: EngineConfig, device: str) -> "StableDiffusion":
        """Read the parts of `spec.folder` onto `device`.

        Raises ModelError: diffusers or transformers cannot read a part; the message contains their reason.
        """
        placement, streamer = text_encoder_placement(config, device), make_streamer(config, device)
        with loading(spec):
            from diffusers import UNet2DConditionModel
            from transformers import CLIPTextModel, CLIPTokenizer

            unet = load_denoiser(UNet2DConditionModel, spec, config, device, streamer)
            ip_adapters = load_ip_adapters(spec, unet, config, device)
            model = cls(
                *load_text_encoder((CLIPTokenizer, CLIPTextModel), spec, "", *placement, streamer),
                unet,
                load_vae(spec, config, device, streamer),
                load_controlnets(spec, config, device),
                load_scheduler_config(spec) | {"steps_offset": 1},  # as the pipeline sets it, whatever the file says
                config,
                Guidance(rescale=spec.guidance_rescale, embedded=unet.config.time_cond_proj_dim is not None),
            )
            model.ip_adapters = ip_adapters
            return model

    def text_encode(self, prompts: Sequence[PromptText]) -> list[Conditioning]:
        """Return the conditioning of each prompt: plain ones padded or truncated, as by diffusers' `encode_prompt`."""
        encoder = self.tokenizer, self.text_encoder
        has_mask = getattr(self.text_encoder.config, "use_attention_mask", False)
        return [
            Conditioning(
                {"encoder_hidden_states": each.tokens_TD.to(self.device, self.dtype)},
                num_cut=each.num_cut,
                is_repeatable=True,
            )
            for each in clip_encode(encoder, prompts, self._read_layer, has_mask=has_mask)
        ]

    def _read_layer(self, outputs: Any, clip_skip: int | None) -> torch.Tensor:
        """Return the outputs of the last layer, or of another one from the end, normalized as the last one's."""
        if clip_skip is None:
            last_BTD: torch.Tensor = outputs[0]
            return last_BTD
        text_model = getattr(self.text_encoder, "text_model", self.text_encoder)  # before and after transformers 5
        layer_BTD: torch.Tensor = text_model.final_layer_norm(outputs.hidden_states[-clip_skip])
        return layer_BTD

    def predict(
        self,
        latents_RCHW: torch.Tensor,
        timesteps_R: torch.Tensor,
        conditioning: ConditioningRows,
        guidance_R: torch.Tensor | None,
        controls: Sequence[ControlRows] = (),
    ) -> torch.Tensor:
        """Return the UNet's raw output [R, C, H, W]; `controls` are the rows that ControlNets steer."""
        residuals = self.controlnets.residuals(latents_RCHW, timesteps_R, conditioning, controls)
        return self._denoiser.predict(latents_RCHW, timesteps_R, conditioning, guidance_R, **residuals)
