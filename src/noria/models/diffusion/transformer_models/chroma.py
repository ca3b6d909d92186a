"""Chroma on one device: a transformer like FLUX.1's, guided, and without CLIP.

Without diffusers' pipeline, and with its numbers. What differs from FLUX.1:

- Conditioned on 512 tokens of T5, which does not attend to padding, and on a mask with the first of the padding.
- diffusers' pipelines give this mask in the model's precision, so that it is added to the logits of attention: pairs of
  tokens of the prompt and of the image have one more, and padding is not hidden. Images are equal to theirs only so.

Shapes: R rows (two for a guided image), T tokens of a prompt, C latent channels, H × W latent size.
"""

from collections.abc import Sequence

import torch

from noria.config import EngineConfig
from noria.models.diffusion.conditioning import Conditioning, ConditioningRows, num_cut_of
from noria.models.diffusion.folders.transformer_models.transformer_folder import MAX_PROMPT_TOKENS, PATCH
from noria.models.diffusion.transformer_models.patches import from_tokens, positions, to_tokens
from noria.models.diffusion.transformer_models.transformer_model import TransformerModel, TransformerParts
from noria.sampling.schedule import Schedule


class Chroma(TransformerModel):
    """The parts of one ChromaPipeline folder, ready on a device."""

    transformer_class = "ChromaTransformer2DModel"
    text_classes = (("T5TokenizerFast", "T5EncoderModel"),)

    def __init__(self, parts: TransformerParts, config: EngineConfig) -> None:
        """Configure loaded parts by `config`, which has no "auto" left."""
        super().__init__(parts, config, latent_channels=parts.transformer.out_channels // PATCH**2)

    def schedule(self, width_px: int, height_px: int, num_steps: int) -> Schedule:
        """Return evenly falling sigmas, and a shift that grows with the number of the image's tokens."""
        return self._shifted_schedule(width_px, height_px, num_steps, gives_flow_sigmas=False)

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
        hidden_BTD = self._text_outputs(tokens)[0].to(self.device, self.dtype)
        shown_BT = torch.arange(mask_BT.shape[1], device=mask_BT.device) <= mask_BT.sum(1, keepdim=True)
        return [
            Conditioning({"encoder_hidden_states": hidden_TD, "attention_mask": shown_T}, num_cut=num_cut)
            for hidden_TD, shown_T, num_cut in zip(
                hidden_BTD, shown_BT.to(self.device, self.dtype), num_cut_of(tokens), strict=True
            )
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
