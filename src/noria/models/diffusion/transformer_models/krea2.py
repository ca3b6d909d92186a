"""Krea 2 on one device: outputs of several layers of a language model and latents in one sequence of a transformer.

Without diffusers' pipeline, and with its numbers. What differs from Stable Diffusion:

- Conditioned on the outputs of L layers of Qwen3-VL, `encoder_hidden_states` [T, L, D], for a prompt in a chat, without
  those of the system's message. The pipeline pads prompts in the middle of the chat, masks the padding and gives it no
  position; here there is none.
- Blocks of 2 × 2 latents are the transformer's tokens; here latents stay [C, H, W], and are packed for its call.
- Rows of a call have different lengths of prompts, which are padded to the longest and masked. Tokens of prompts have
  no position in the transformer.
- The steps' noise levels fall evenly from 1, and the scheduler shifts them by the image's size, or, of the distilled
  model, by a constant.
- Guidance is c + g·(c - u), active above 0.

Shapes: B images, R rows, T tokens of a prompt, C latent channels, H × W latent size.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch

from noria.config import EngineConfig
from noria.models.diffusion.conditioning import Conditioning, ConditioningRows
from noria.models.diffusion.folders.transformer_models.krea2_folder import Krea2Index
from noria.models.diffusion.folders.transformer_models.qwen_folder import (
    END_OF_CHAT,
    MAX_PROMPT_TOKENS,
    NUM_SYSTEM_TOKENS,
    SYSTEM_PROMPT,
)
from noria.models.diffusion.folders.transformer_models.transformer_folder import PATCH
from noria.models.diffusion.transformer_models.patches import from_tokens, to_tokens
from noria.models.diffusion.transformer_models.transformer_model import TRAIN_STEPS, TransformerModel, TransformerParts
from noria.models.files.weights import read_struct
from noria.sampling.guidance import Guidance
from noria.sampling.schedule import Schedule, evenly_falling_sigmas, shift_of_length

_NUM_END_TOKENS = 5  # tokens of `END_OF_CHAT`: a prompt is cut so that they fit, whatever the tokenizer
_DISTILLED_SHIFT = 1.15


class Krea2(TransformerModel):
    """The parts of one Krea2Pipeline folder, ready on a device."""

    transformer_class = "Krea2Transformer2DModel"
    text_classes = (("Qwen2Tokenizer", "Qwen3VLModel"),)
    pads_right = True

    def __init__(self, parts: TransformerParts, config: EngineConfig) -> None:
        """Configure loaded parts by `config`, which has no "auto" left."""
        channels = parts.transformer.config.in_channels // PATCH**2
        super().__init__(parts, config, Guidance("cond", active_above=0.0), channels)
        self._text_encoder = self._text_encoder.language_model  # its layers for images are not kept
        self._index = read_struct(parts.spec.path / "model_index.json", Krea2Index)

    def schedule(self, width_px: int, height_px: int, num_steps: int) -> Schedule:
        """Return evenly falling sigmas, and a shift that grows with the number of the image's tokens, or a constant."""
        num_tokens = self.num_tokens(width_px, height_px)
        mu = _DISTILLED_SHIFT if self._index.is_distilled else shift_of_length(num_tokens, self.scheduler_config)
        return Schedule(evenly_falling_sigmas(num_steps), mu=mu, gives_flow_sigmas=True)

    def text_encode(self, prompts: Sequence[str | None]) -> list[Conditioning]:
        """Return the conditioning of each prompt, cut as by diffusers' `encode_prompt`, without padding."""

        def encode(tokens: Any) -> torch.Tensor:
            outputs = self._text_outputs(tokens, output_hidden_states=True, use_cache=False)
            return torch.stack([outputs.hidden_states[layer] for layer in self._index.text_layers], dim=2)

        return self._encode_chats(
            [SYSTEM_PROMPT + ("" if prompt is None else prompt) for prompt in prompts],
            END_OF_CHAT,
            NUM_SYSTEM_TOKENS,
            NUM_SYSTEM_TOKENS + MAX_PROMPT_TOKENS - _NUM_END_TOKENS,
            encode,
        )

    def predict(
        self,
        latents_RCHW: torch.Tensor,
        timesteps_R: torch.Tensor,
        conditioning: ConditioningRows,
        guidance_R: torch.Tensor | None,  # noqa: ARG002 - its guidance is not embedded
    ) -> torch.Tensor:
        """Return the velocity [R, C, H, W]."""
        height, width = latents_RCHW.shape[2:]
        num_tokens = conditioning.tokens["encoder_hidden_states"].shape[1]
        (velocity_RND,) = self._transformer(
            hidden_states=to_tokens(latents_RCHW.to(self.dtype)),
            timestep=(timesteps_R / TRAIN_STEPS).to(self.dtype),
            position_ids=_positions(num_tokens, height // PATCH, width // PATCH, self.device),
            encoder_attention_mask=conditioning.mask_RT,
            **conditioning.tokens,
            return_dict=False,
        )
        return from_tokens(velocity_RND, height, width)


@functools.lru_cache(maxsize=64)
def _positions(num_tokens: int, rows: int, columns: int, device: torch.device) -> torch.Tensor:
    """Return [T + N, 3]: zeros for a prompt's tokens; 0, row and column for an image's."""
    image_N3 = torch.cartesian_prod(torch.zeros(1), torch.arange(rows).float(), torch.arange(columns).float())
    return torch.cat([torch.zeros(num_tokens, 3), image_N3]).to(device)
