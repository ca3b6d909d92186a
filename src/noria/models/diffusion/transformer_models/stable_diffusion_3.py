"""Stable Diffusion 3 and 3.5 on one device: three text encoders, a transformer that predicts the velocity.

Without diffusers' pipeline, and with its numbers. What differs from Stable Diffusion:

- Conditioned on 77 tokens of two CLIPs side by side, padded with zeros to the width of T5, then on 256 tokens of T5,
  their padding included; and on the pooled outputs of both CLIPs, `pooled_projections` [P1 + P2].
- The scheduler sets the steps' noise levels itself, with the shift of its configuration.

Shapes: B images, R rows (two for a guided image), T tokens, C latent channels, H × W latent size.
"""

from collections.abc import Sequence

import torch

from noria.config import EngineConfig
from noria.models.diffusion.conditioning import Conditioning, ConditioningRows
from noria.models.diffusion.transformer_models.transformer_model import TransformerModel, TransformerParts, text_outputs
from noria.sampling.schedule import DEFAULT_SCHEDULE, Schedule, shift_of_length

_MAX_TOKENS = 256  # tokens of T5: the pipeline's default


class StableDiffusion3(TransformerModel):
    """The parts of one StableDiffusion3Pipeline folder, ready on a device."""

    transformer_class = "SD3Transformer2DModel"
    text_classes = (
        ("CLIPTokenizer", "CLIPTextModelWithProjection"),
        ("CLIPTokenizer", "CLIPTextModelWithProjection"),
        ("T5TokenizerFast", "T5EncoderModel"),
    )

    def __init__(self, parts: TransformerParts, config: EngineConfig) -> None:
        """Configure loaded parts by `config`, which has no "auto" left."""
        super().__init__(parts, config)
        *self._clips, self._t5 = parts.text_encoders
        self.lora_parts = {
            "transformer": parts.transformer,
            "text_encoder": self._clips[0][1],
            "text_encoder_2": self._clips[1][1],
            "text_encoder_3": self._t5[1],
        }
        self._patch: int = parts.transformer.config.patch_size

    def schedule(self, width_px: int, height_px: int, num_steps: int) -> Schedule:  # noqa: ARG002
        """Return the scheduler's own times, with a shift by the image's size if its configuration wants one."""
        if not self.scheduler_config.get("use_dynamic_shifting"):
            return DEFAULT_SCHEDULE
        _, height, width = self.latent_shape(width_px, height_px)
        num_tokens = height // self._patch * (width // self._patch)
        return Schedule(mu=shift_of_length(num_tokens, self.scheduler_config))

    def text_encode(self, prompts: Sequence[str | None]) -> list[Conditioning]:
        """Return the conditioning of each prompt, as by diffusers' `encode_prompt`."""
        texts = ["" if prompt is None else prompt for prompt in prompts]
        num_tokens = self._clips[0][0].model_max_length
        outputs = [text_outputs(clip, texts, num_tokens, output_hidden_states=True)[0] for clip in self._clips]
        pooled_BP = torch.cat([each[0] for each in outputs], dim=-1)
        clip_BTD = torch.cat([each.hidden_states[-2] for each in outputs], dim=-1)
        of_t5, num_cut = text_outputs(self._t5, texts, _MAX_TOKENS)
        t5_BTD = of_t5.last_hidden_state
        clip_BTD = torch.nn.functional.pad(clip_BTD, (0, t5_BTD.shape[-1] - clip_BTD.shape[-1]))
        tokens_BTD = torch.cat([clip_BTD, t5_BTD], dim=1)
        return self._conditioned(tokens_BTD, num_cut, {"pooled_projections": pooled_BP})

    def predict(
        self,
        latents_RCHW: torch.Tensor,
        timesteps_R: torch.Tensor,
        conditioning: ConditioningRows,
        guidance_R: torch.Tensor | None,  # noqa: ARG002 - its guidance is not embedded
    ) -> torch.Tensor:
        """Return the velocity [R, C, H, W]."""
        outputs = self._transformer(
            hidden_states=latents_RCHW.to(self.dtype),
            timestep=timesteps_R,
            **conditioning.tokens,
            **conditioning.vectors,
            return_dict=False,
        )
        velocity_RCHW: torch.Tensor = outputs[0]
        return velocity_RCHW
