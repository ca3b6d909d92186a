"""Z-Image on one device: a language model's tokens and latents in one sequence of a transformer, whose rows are ragged.

As the other families, without diffusers' pipeline, and with its numbers. What differs from Stable Diffusion:

- Conditioned on the hidden states before Qwen3's last layer, `caption` [T, D], of a prompt in a chat of one message.
- Rows of a call have different sizes of images and lengths of prompts; the transformer pads and masks them itself.
- It predicts the velocity from the image to the noise, with its sign turned, at a time that runs from 0 to 1.
- Guidance is c + g·(c - u), active above 0.
- The start is drawn in float32, whatever the model's dtype.

Shapes: B images, R rows (two for a guided image), T tokens of a prompt, C latent channels, H × W latent size.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from noria.config import EngineConfig
from noria.models.diffusion.conditioning import Conditioning, ConditioningRows
from noria.models.diffusion.diffusion_model import LatentRows
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
from noria.models.diffusion.transformer_models.transformer_model import QWEN_CHAT, TRAIN_STEPS, TransformerModel
from noria.protocol.diffusion import DiffusionModelSpec
from noria.sampling.guidance import Guidance
from noria.sampling.schedule import Schedule, shift_of_length


class ZImage(TransformerModel):
    """The parts of one ZImagePipeline folder, ready on a device."""

    def __init__(
        self,
        tokenizer: Any,
        text_encoder: Any,
        transformer: Any,
        vae: Any,
        scheduler_config: dict[str, Any],
        config: EngineConfig,
        guidance: Guidance,
    ) -> None:
        """Configure loaded parts by `config`, which has no "auto" left; device and dtype are the transformer's."""
        super().__init__(transformer, vae, scheduler_config, config, guidance, transformer.config.in_channels)
        self.noise_dtype = torch.float32
        self.lora_parts: Mapping[str, torch.nn.Module] = {"transformer": transformer}
        self._tokenizer, self._text_encoder = tokenizer, text_encoder

    @classmethod
    def load(cls, spec: DiffusionModelSpec, config: EngineConfig, device: str) -> "ZImage":
        """Read the parts of `spec.folder` onto `device`.

        Raises:
            ConfigError: a setting does not work with this family.
            ModelError: diffusers or transformers cannot read a part; the message contains their reason.

        """
        dtype, placement = DTYPES[config.dtype], text_encoder_placement(config, device)
        with loading(spec):
            from diffusers import ZImageTransformer2DModel
            from transformers import Qwen2Tokenizer, Qwen3Model

            return cls(
                *load_text_encoder((Qwen2Tokenizer, Qwen3Model), spec, "", *placement, padding_side="right"),
                load_part(ZImageTransformer2DModel, spec, "transformer", dtype, device),
                load_vae(spec, dtype, device),
                load_scheduler_config(spec),
                config,
                Guidance("cond", active_above=0.0, norm_limit=spec.cfg_normalization),
            )

    def call_size(self, num_pixels: int) -> tuple[int, int]:  # noqa: ARG002
        """Return the same for all sizes, which share calls."""
        return 0, 0

    def schedule(self, width_px: int, height_px: int, num_steps: int) -> Schedule:
        """Return evenly spaced noise levels, and the shift of the size if the scheduler's configuration wants one."""
        sigmas = tuple(torch.linspace(1.0, 1 / num_steps, num_steps).tolist())  # in float32, as the pipeline
        if not self.scheduler_config.get("use_dynamic_shifting"):
            return Schedule(sigmas)
        _, height, width = self.latent_shape(width_px, height_px)
        return Schedule(sigmas, mu=shift_of_length(height // PATCH * (width // PATCH), self.scheduler_config))

    def text_encode(self, prompts: Sequence[str | None]) -> list[Conditioning]:
        """Return the conditioning of each prompt, truncated as by diffusers' `encode_prompt`, without padding."""
        chats = [QWEN_CHAT.format("" if prompt is None else prompt) for prompt in prompts]
        tokens = self._tokenizer(
            chats, padding=True, max_length=MAX_PROMPT_TOKENS, truncation=True, return_tensors="pt"
        )
        outputs = self._text_encoder(
            input_ids=tokens.input_ids.to(self._text_encoder.device),
            attention_mask=tokens.attention_mask.to(self._text_encoder.device),
            output_hidden_states=True,
            use_cache=False,
        )
        lengths = tokens.attention_mask.sum(1).tolist()
        hidden_BTD = outputs.hidden_states[-2].to(self.device, self.dtype)
        return [
            Conditioning({"caption": hidden_TD[:length]}) for hidden_TD, length in zip(hidden_BTD, lengths, strict=True)
        ]

    def predict(
        self,
        latents_R: LatentRows,
        timesteps_R: torch.Tensor,
        conditioning: ConditioningRows,
        guidance_R: torch.Tensor | None,  # noqa: ARG002 - its guidance is not embedded
    ) -> LatentRows:
        """Return the velocity of each row, of the row's shape; rows can have different sizes."""
        captions = conditioning.tokens["caption"]
        outputs = self._transformer(
            [latents_CHW.to(self.dtype)[:, None] for latents_CHW in latents_R],  # with one frame
            (TRAIN_STEPS - timesteps_R) / TRAIN_STEPS,
            [captions[row, :length] for row, length in enumerate(conditioning.lengths)],
            return_dict=False,
        )[0]
        velocities = [-output_CFHW[:, 0].float() for output_CFHW in outputs]
        return torch.stack(velocities) if isinstance(latents_R, torch.Tensor) else velocities
