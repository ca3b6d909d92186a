"""Chroma on one device: a transformer like FLUX.1's, guided, and without CLIP.

Without diffusers' pipeline, and with its numbers. What differs from FLUX.1:

- Conditioned on 512 tokens of T5, which does not attend to padding, and on a mask with the first of the padding.
- diffusers' pipelines give this mask in the model's precision, so that it is added to the logits of attention: pairs of
  tokens of the prompt and of the image have one more, and padding is not hidden. Images are equal to theirs only so.

Shapes: R rows (two for a guided image), T tokens of a prompt, C latent channels, H × W latent size.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from noria.config import EngineConfig
from noria.models.diffusion.conditioning import Conditioning, ConditioningRows
from noria.models.diffusion.folders.transformer_models.transformer_folder import MAX_PROMPT_TOKENS, PATCH
from noria.models.diffusion.part_loading import (
    DTYPES,
    load_part,
    load_scheduler_config,
    load_text_encoder,
    load_vae,
    loading,
    text_encoder_placement,
)
from noria.models.diffusion.transformer_models.packed_model import PackedModel, positions
from noria.models.diffusion.transformer_models.patches import from_tokens, to_tokens
from noria.protocol.diffusion import DiffusionModelSpec
from noria.sampling.guidance import CLASSIFIER_FREE


class Chroma(PackedModel):
    """The parts of one ChromaPipeline folder, ready on a device."""

    def __init__(
        self,
        t5: tuple[Any, Any],
        transformer: Any,
        vae: Any,
        scheduler_config: dict[str, Any],
        config: EngineConfig,
    ) -> None:
        """Configure loaded parts by `config`, which has no "auto" left; device and dtype are those of the transformer.

        `t5` is a tokenizer with its text encoder.
        """
        super().__init__(transformer, vae, scheduler_config, config, CLASSIFIER_FREE)
        self.lora_parts: Mapping[str, torch.nn.Module] = {"transformer": transformer}
        self._tokenizer, self._text_encoder = t5

    @classmethod
    def load(cls, spec: DiffusionModelSpec, config: EngineConfig, device: str) -> "Chroma":
        """Read the parts of `spec.folder` onto `device`.

        Raises:
            ModelError: diffusers or transformers cannot read a part; the message contains their reason.

        """
        dtype, placement = DTYPES[config.dtype], text_encoder_placement(config, device)
        with loading(spec):
            from diffusers import ChromaTransformer2DModel
            from transformers import T5EncoderModel, T5TokenizerFast

            t5 = load_text_encoder((T5TokenizerFast, T5EncoderModel), spec, "", *placement)
            transformer = load_part(ChromaTransformer2DModel, spec, "transformer", dtype, device)
            return cls(t5, transformer, load_vae(spec, dtype, device), load_scheduler_config(spec), config)

    def text_encode(self, prompts: Sequence[str | None]) -> list[Conditioning]:
        """Return the conditioning of each prompt, as by diffusers' `encode_prompt`."""
        tokens = self._tokenizer(
            ["" if prompt is None else prompt for prompt in prompts],
            padding="max_length",
            max_length=MAX_PROMPT_TOKENS,
            truncation=True,
            return_tensors="pt",
        )
        mask_BT = tokens.attention_mask.to(self._text_encoder.device)
        outputs = self._text_encoder(tokens.input_ids.to(self._text_encoder.device), attention_mask=mask_BT)
        hidden_BTD = outputs[0].to(self.device, self.dtype)
        shown_BT = torch.arange(mask_BT.shape[1], device=mask_BT.device) <= mask_BT.sum(1, keepdim=True)
        return [
            Conditioning({"encoder_hidden_states": hidden_TD, "attention_mask": shown_T})
            for hidden_TD, shown_T in zip(hidden_BTD, shown_BT.to(self.device, self.dtype), strict=True)
        ]

    def predict(
        self,
        latents_RCHW: torch.Tensor,
        timesteps_R: torch.Tensor,
        conditioning: ConditioningRows,
        guidance_R: torch.Tensor | None,  # noqa: ARG002 - its guidance is not embedded
    ) -> torch.Tensor:
        """Return the velocity [R, C, H, W]."""
        height, width = latents_RCHW.shape[2:]
        packed_RND, shown_RT = to_tokens(latents_RCHW.to(self.dtype)), conditioning.tokens["attention_mask"]
        (velocity_RND,) = self._transformer(
            hidden_states=packed_RND,
            timestep=timesteps_R.to(self.dtype) / 1000,
            encoder_hidden_states=conditioning.tokens["encoder_hidden_states"],
            attention_mask=torch.cat([shown_RT, shown_RT.new_ones(packed_RND.shape[:2])], dim=1),
            txt_ids=positions(shown_RT.shape[1], 0, self.device, self.dtype),
            img_ids=positions(height // PATCH, width // PATCH, self.device, self.dtype),
            return_dict=False,
        )
        return from_tokens(velocity_RND, height, width)
