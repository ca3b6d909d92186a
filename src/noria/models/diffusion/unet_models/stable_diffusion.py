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
from noria.models.diffusion.part_loading import (
    DTYPES,
    load_part,
    load_scheduler_config,
    load_text_encoder,
    load_vae,
    loading,
    text_encoder_placement,
)
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
        self._num_tokens: int = tokenizer.model_max_length

    @classmethod
    def load(cls, spec: DiffusionModelSpec, config: EngineConfig, device: str) -> "StableDiffusion":
        """Read the parts of `spec.folder` onto `device`.

        Raises:
            ModelError: diffusers or transformers cannot read a part; the message contains their reason.

        """
        dtype, placement = DTYPES[config.dtype], text_encoder_placement(config, device)
        with loading(spec):
            from diffusers import UNet2DConditionModel
            from transformers import CLIPTextModel, CLIPTokenizer

            unet = load_part(UNet2DConditionModel, spec, "unet", dtype, device)
            return cls(
                *load_text_encoder((CLIPTokenizer, CLIPTextModel), spec, "", *placement),
                unet,
                load_vae(spec, dtype, device),
                load_controlnets(spec, config, device),
                load_scheduler_config(spec) | {"steps_offset": 1},  # as the pipeline sets it, whatever the file says
                config,
                Guidance(rescale=spec.guidance_rescale, embedded=unet.config.time_cond_proj_dim is not None),
            )

    def text_encode(self, prompts: Sequence[str | None]) -> list[Conditioning]:
        """Return the conditioning of each prompt, padded or truncated to T tokens, as by diffusers' `encode_prompt`."""
        tokens = self.tokenizer(
            list(prompts), padding="max_length", max_length=self._num_tokens, truncation=True, return_tensors="pt"
        )
        mask = (
            tokens.attention_mask.to(self.text_encoder.device)
            if getattr(self.text_encoder.config, "use_attention_mask", False)
            else None
        )
        embeddings_BTD = self.text_encoder(tokens.input_ids.to(self.text_encoder.device), attention_mask=mask)[0]
        return [
            Conditioning({"encoder_hidden_states": each_TD}) for each_TD in embeddings_BTD.to(self.device, self.dtype)
        ]

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
