"""PixArt-Σ on one device: a transformer that predicts noise, with T5 and the VAE of Stable Diffusion XL.

It predicts noise, not a velocity as the other families here: times and previews are those of Stable Diffusion. Without
diffusers' pipeline, and with its numbers. What differs from Stable Diffusion:

- Conditioned on T5's outputs for a prompt in lower case, without padding, which the pipeline masks.
- Rows of a call have different lengths of prompts, which the transformer masks.
- Models with twice as many channels of output also predict a variance, which is not used.

Shapes: B images, R rows, T tokens of a prompt, C latent channels, H × W latent size.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
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
from noria.models.diffusion.transformer_models.transformer_model import TransformerModel
from noria.models.diffusion.vae import without_overflow
from noria.protocol.diffusion import DiffusionModelSpec
from noria.sampling.guidance import CLASSIFIER_FREE
from noria.sampling.previews import alpha_bars, clean_weights
from noria.sampling.schedule import DEFAULT_SCHEDULE, Schedule

_MAX_TOKENS = 300  # of a prompt, the pipeline's default; longer ones are cut
_NO_CONDITIONS = {"resolution": None, "aspect_ratio": None}  # inputs of PixArt-α


class PixArtSigma(TransformerModel):
    """The parts of one PixArtSigmaPipeline folder, ready on a device."""

    def __init__(
        self, t5: tuple[Any, Any], transformer: Any, vae: Any, scheduler_config: dict[str, Any], config: EngineConfig
    ) -> None:
        """Configure loaded parts by `config`, which has no "auto" left; device and dtype are the transformer's.

        `t5` is a tokenizer with its text encoder.
        """
        channels = transformer.config.in_channels
        super().__init__(transformer, vae, scheduler_config, config, CLASSIFIER_FREE, channels)
        self.lora_parts: Mapping[str, torch.nn.Module] = {}  # diffusers has no loader for them
        self._tokenizer, self._text_encoder = t5
        self._alpha_bars = alpha_bars(scheduler_config)
        self._prediction_type: str = scheduler_config.get("prediction_type", "epsilon")

    @classmethod
    def load(cls, spec: DiffusionModelSpec, config: EngineConfig, device: str) -> "PixArtSigma":
        """Read the parts of `spec.folder` onto `device`.

        Raises:
            ConfigError: a setting does not work with this family.
            ModelError: diffusers or transformers cannot read a part; the message contains their reason.

        """
        dtype, placement = DTYPES[config.dtype], text_encoder_placement(config, device)
        with loading(spec):
            from diffusers import PixArtTransformer2DModel
            from transformers import T5EncoderModel, T5TokenizerFast

            t5 = load_text_encoder((T5TokenizerFast, T5EncoderModel), spec, "", *placement)
            transformer = load_part(PixArtTransformer2DModel, spec, "transformer", dtype, device)
            vae = without_overflow(load_vae(spec, dtype, device))
            return cls(t5, transformer, vae, load_scheduler_config(spec), config)

    def schedule(self, width_px: int, height_px: int, num_steps: int) -> Schedule:  # noqa: ARG002
        """Return the scheduler's own times, whatever the size."""
        return DEFAULT_SCHEDULE

    def clean_weights(self, timesteps_B: np.ndarray) -> np.ndarray:
        """Return the weights of input and output in a preview; see `clean_weights` in `sampling/previews.py`."""
        return clean_weights(timesteps_B, self._alpha_bars, self._prediction_type)

    def text_encode(self, prompts: Sequence[str | None]) -> list[Conditioning]:
        """Return the conditioning of each prompt, cut as by diffusers' `encode_prompt`, without padding.

        Prompts are not cleaned of links and symbols, as by the pipeline where packages for it are not installed.
        """
        texts = ["" if prompt is None else prompt.lower().strip() for prompt in prompts]
        tokens = self._tokenizer(
            texts, padding=True, padding_side="right", max_length=_MAX_TOKENS, truncation=True, return_tensors="pt"
        )
        mask_BT = tokens.attention_mask.to(self._text_encoder.device)
        outputs_BTD = self._text_encoder(tokens.input_ids.to(self._text_encoder.device), attention_mask=mask_BT)[0]
        return [
            Conditioning({"encoder_hidden_states": output_TD[:length]})
            for output_TD, length in zip(
                outputs_BTD.to(self.device, self.dtype), tokens.attention_mask.sum(1).tolist(), strict=True
            )
        ]

    def predict(
        self,
        latents_RCHW: torch.Tensor,
        timesteps_R: torch.Tensor,
        conditioning: ConditioningRows,
        guidance_R: torch.Tensor | None,  # noqa: ARG002 - its guidance is not embedded
    ) -> torch.Tensor:
        """Return the output [R, C, H, W] of the kind that the model predicts, noise as published."""
        outputs = self._transformer(
            latents_RCHW.to(self.dtype),
            timestep=timesteps_R,
            added_cond_kwargs=_NO_CONDITIONS,
            encoder_attention_mask=conditioning.mask_RT,
            **conditioning.tokens,
            return_dict=False,
        )
        output_RCHW: torch.Tensor = outputs[0][:, : self._latent_channels]
        return output_RCHW
