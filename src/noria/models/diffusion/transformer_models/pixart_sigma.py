"""PixArt-Σ on one device: a transformer that predicts noise, with T5 and the VAE of Stable Diffusion XL.

It predicts noise, not a velocity as the other families here: times and previews are those of Stable Diffusion. Without
diffusers' pipeline, and with its numbers. What differs from Stable Diffusion:

- Conditioned on T5's outputs for a prompt in lower case, without padding, which the pipeline masks.
- Rows of a call have different lengths of prompts, which the transformer masks.
- Models with twice as many channels of output also predict a variance, which is not used.

Shapes: B images, R rows, T tokens of a prompt, C latent channels, H × W latent size.
"""

from collections.abc import Sequence

import numpy as np
import torch

from noria.config import EngineConfig
from noria.models.diffusion.conditioning import Conditioning, ConditioningRows
from noria.models.diffusion.transformer_models.transformer_model import TransformerModel, TransformerParts
from noria.sampling.previews import alpha_bars, clean_weights

_MAX_TOKENS = 300  # tokens of a prompt, the pipeline's default; longer ones are cut
_NO_CONDITIONS = {"resolution": None, "aspect_ratio": None}  # inputs of PixArt-α


class PixArtSigma(TransformerModel):
    """The parts of one PixArtSigmaPipeline folder, ready on a device."""

    transformer_class = "PixArtTransformer2DModel"
    text_classes = (("T5TokenizerFast", "T5EncoderModel"),)
    vae_may_overflow = True

    def __init__(self, parts: TransformerParts, config: EngineConfig) -> None:
        """Configure loaded parts by `config`, which has no "auto" left."""
        super().__init__(parts, config)
        self.lora_parts = {}  # diffusers has no loader for them
        self._alpha_bars = alpha_bars(parts.scheduler_config)
        self._prediction_type: str = parts.scheduler_config.get("prediction_type", "epsilon")

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
        return self._without_padding(self._text_outputs(tokens)[0], tokens)

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
