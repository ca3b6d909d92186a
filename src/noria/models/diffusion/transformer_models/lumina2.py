"""Lumina 2 on one device: a language model's tokens and latents in one sequence of a transformer.

Without diffusers' pipeline, and with its numbers. What differs from Stable Diffusion:

- Conditioned on the hidden states before Gemma 2's last layer. A system prompt precedes prompts, not negative ones.
- Rows of a call have different lengths of prompts, which the transformer masks. `_Positions` knows them from the host,
  where diffusers waits for the device to count them.
- It predicts the velocity from the image to the noise, with its sign turned, at a time that runs from 0 to 1.
- Guided outputs get the norms of the prompt's, of each line of latents in a channel: the pipeline's axis.
- The steps' noise levels fall evenly from 1. A scheduler that shifts them by the image's size gets the number of
  channels instead, from the pipeline.

Shapes: B images, R rows, T tokens of a prompt, C latent channels, H × W latent size, N tokens of an image, S = T + N of
the longest row, D numbers of a token.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence

from noria.config import EngineConfig
from noria.models.diffusion.conditioning import Conditioning, ConditioningRows
from noria.models.diffusion.folders.transformer_models.lumina2_folder import MAX_PROMPT_TOKENS
from noria.models.diffusion.folders.transformer_models.transformer_folder import PATCH
from noria.models.diffusion.transformer_models.transformer_model import TRAIN_STEPS, TransformerModel, TransformerParts
from noria.sampling.guidance import Guidance
from noria.sampling.schedule import Schedule, evenly_falling_sigmas, shift_of_length

_SYSTEM_PROMPT = (
    "You are an assistant designed to generate superior images with the superior degree of image-text alignment based "
    "on textual prompts or user prompts. <Prompt Start> "
)


class Lumina2(TransformerModel):
    """The parts of one Lumina2Pipeline folder, ready on a device."""

    transformer_class = "Lumina2Transformer2DModel"
    text_classes = (("GemmaTokenizer", "Gemma2Model"),)
    pads_right = True

    def __init__(self, parts: TransformerParts, config: EngineConfig) -> None:
        """Configure loaded parts by `config`, which has no "auto" left."""
        super().__init__(parts, config, Guidance(equal_norms="lines", prompt_prefix=_SYSTEM_PROMPT))
        transformer = parts.transformer
        self._positions = transformer.rope_embedder = _Positions(transformer.rope_embedder, transformer.device)

    def schedule(self, width_px: int, height_px: int, num_steps: int) -> Schedule:  # noqa: ARG002
        """Return evenly falling sigmas, and a shift that is the same for all sizes."""
        mu = shift_of_length(self._latent_channels, self.scheduler_config)
        return Schedule(evenly_falling_sigmas(num_steps), mu=mu, gives_flow_sigmas=True)

    def text_encode(self, prompts: Sequence[str | None]) -> list[Conditioning]:
        """Return the conditioning of each prompt, cut as by diffusers' `encode_prompt`, without padding."""
        texts = ["" if prompt is None else prompt for prompt in prompts]
        tokens = self._tokenizer(
            texts, padding=True, max_length=MAX_PROMPT_TOKENS, truncation=True, return_tensors="pt"
        )
        outputs = self._text_outputs(tokens, output_hidden_states=True, use_cache=False)
        return self._without_padding(outputs.hidden_states[-2], tokens)

    def predict(
        self,
        latents_RCHW: torch.Tensor,
        timesteps_R: torch.Tensor,
        conditioning: ConditioningRows,
        guidance_R: torch.Tensor | None,  # noqa: ARG002 - its guidance is not embedded
    ) -> torch.Tensor:
        """Return the velocity [R, C, H, W]."""
        mask_RT = conditioning.mask_RT
        if mask_RT is None:
            num_tokens = conditioning.lengths[0]
            mask_RT = torch.ones(len(latents_RCHW), num_tokens, dtype=torch.bool, device=self.device)
        self._positions.lengths = conditioning.lengths
        outputs = self._transformer(
            hidden_states=latents_RCHW.to(self.dtype),
            timestep=1 - timesteps_R / TRAIN_STEPS,
            encoder_attention_mask=mask_RT,
            **conditioning.tokens,
            return_dict=False,
        )
        velocity_RCHW: torch.Tensor = -outputs[0]
        return velocity_RCHW


class _Positions(torch.nn.Module):
    """Gives the transformer tokens of latents and rotary positions, as diffusers' Lumina2RotaryPosEmbed.

    A prompt's tokens are at (t, 0, 0), its image's at (length of the prompt, row, column).
    """

    def __init__(self, replaced: Any, device: torch.device) -> None:
        super().__init__()
        self._angles = [each.to(device) for each in replaced.freqs_cis]
        self.lengths: tuple[int, ...] = ()  # lengths of the prompts of the next call
        # Those of the last call, which the next of the same images repeats; of 32 rows of 2048 × 2048 px 13 MB.
        self._ids: tuple[tuple[tuple[int, ...], int, int], torch.Tensor] = ((), 0, 0), torch.empty(0)

    def forward(
        self, latents_RCHW: torch.Tensor, mask_RT: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, list[int], list[int]]:
        """Return tokens [R, N, D], positions of prompts [R, T, …], images [R, N, …] and both, and lengths of rows."""
        num_rows, channels, height, width = latents_RCHW.shape
        rows, columns = height // PATCH, width // PATCH
        patches = latents_RCHW.reshape(num_rows, channels, rows, PATCH, columns, PATCH)
        tokens_RND = patches.permute(0, 2, 4, 3, 5, 1).reshape(num_rows, rows * columns, -1)
        key = self.lengths, rows, columns
        if key != self._ids[0]:
            self._ids = key, _position_ids(*key).to(latents_RCHW.device)
        ids_RS3 = self._ids[1]
        joint = torch.cat([angles[ids_RS3[..., axis]] for axis, angles in enumerate(self._angles)], dim=-1)
        images = torch.stack([joint[row, length : length + rows * columns] for row, length in enumerate(self.lengths)])
        prompts = joint[:, : mask_RT.shape[1]]  # positions of the padding do not matter: it is masked
        lengths = list(self.lengths)
        return tokens_RND, prompts, images, joint, lengths, [length + rows * columns for length in lengths]


def _position_ids(lengths: tuple[int, ...], rows: int, columns: int) -> torch.Tensor:
    """Return [R, S, 3] for prompts of these lengths, each followed by its image; zeros behind."""
    image_N3 = torch.cartesian_prod(torch.zeros(1, dtype=torch.int64), torch.arange(rows), torch.arange(columns))
    of_rows = []
    for length in lengths:
        prompt_T3 = torch.zeros(length, 3, dtype=torch.int64)
        prompt_T3[:, 0] = torch.arange(length)
        of_rows.append(torch.cat([prompt_T3, image_N3 + torch.tensor([length, 0, 0])]))
    return pad_sequence(of_rows, batch_first=True)
