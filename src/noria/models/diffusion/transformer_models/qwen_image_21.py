"""Qwen-Image 2.1 on one device: the tokens of a prompt and then those of an image, in one sequence of a transformer.

Without diffusers' pipeline, and with its numbers. What differs from Qwen-Image:

- Conditioned on the outputs of the last layer of Qwen3-VL before its norm, for a prompt in a chat, without those of the
  system's message.
- A token of the prompt attends to those before it, one of the image to all. The first are modulated as at time 0.
- A latent is a token. The VAE has a channel for opacity.
- Rows of a call have different sizes of images and lengths of prompts: both are padded to the longest, and the image's
  padding and that of the prompt are hidden from the image. `_forward` and `_RowAttention` replace diffusers', which
  have one layout for all rows.
- Guidance is u + g·(c - u), and a request is guided only if it has a negative prompt.

Shapes: R rows, T tokens of a prompt, N tokens of an image, S = T + N, C latent channels, H × W latent size, D numbers
of a token, E half of an attention head.
"""

import functools
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch.nn.utils.rnn import pad_sequence

from noria.config import EngineConfig
from noria.models.diffusion.conditioning import Conditioning, ConditioningRows
from noria.models.diffusion.diffusion_model import LatentRows
from noria.models.diffusion.folders.transformer_models.qwen_folder import END_OF_CHAT
from noria.models.diffusion.folders.transformer_models.qwen_image_21_folder import Qwen21Index
from noria.models.diffusion.transformer_models.qwen_image import padding_mask, rotate
from noria.models.diffusion.transformer_models.token_rows import image_rows
from noria.models.diffusion.transformer_models.transformer_model import TRAIN_STEPS, TransformerModel, TransformerParts
from noria.models.diffusion.vae import LatentVae, OpaqueVae
from noria.models.weights import read_struct
from noria.sampling.guidance import Guidance
from noria.sampling.schedule import Schedule, evenly_falling_sigmas, shift_of_length

_SYSTEM_MESSAGE = "<|im_start|>system\nComprehend and analyze the provided prompt.<|im_end|>\n"
_BEFORE_PROMPT = "<|im_start|>user\n"
_MAX_PROMPT_TOKENS = 1024  # with `_BEFORE_PROMPT`; the pipeline has no limit


class QwenImage21(TransformerModel):
    """The parts of one QwenImage21Pipeline folder, ready on a device."""

    vae_class: ClassVar[type[LatentVae]] = OpaqueVae
    transformer_class = "QwenImage21Transformer2DModel"
    text_classes = (("Qwen2Tokenizer", "Qwen3VLModel"),)
    pads_right = True

    def __init__(self, parts: TransformerParts, config: EngineConfig) -> None:
        """Configure loaded parts by `config`, which has no "auto" left."""
        transformer = parts.transformer
        transformer.set_attn_processor(_RowAttention())
        transformer.forward = functools.partial(_forward, transformer)
        super().__init__(parts, config, Guidance(negative_absent="unguided"))
        self._text_encoder = self._text_encoder.language_model  # its layers for images are not kept
        self._text_encoder.norm = torch.nn.Identity()
        self._num_system_tokens = len(self._tokenizer(_SYSTEM_MESSAGE).input_ids)
        self._own_sigmas = read_struct(parts.spec.path / "model_index.json", Qwen21Index).sample_sigmas or ()
        self._frequencies = [each.to(self.device) for each in transformer.pos_embed.freqs]  # frames, heights, widths

    def call_size(self, num_pixels: int) -> tuple[int, int]:  # noqa: ARG002
        """Return the same for all sizes, which share calls."""
        return 0, 0

    def schedule(self, width_px: int, height_px: int, num_steps: int) -> Schedule:
        """Return the folder's own sigmas at their number of steps, else evenly falling ones, and a shift by size."""
        _, height, width = self.latent_shape(width_px, height_px)
        sigmas = self._own_sigmas if num_steps == len(self._own_sigmas) else evenly_falling_sigmas(num_steps)
        return Schedule(sigmas, mu=shift_of_length(height * width, self.scheduler_config), gives_flow_sigmas=True)

    def text_encode(self, prompts: Sequence[str | None]) -> list[Conditioning]:
        """Return the conditioning of each prompt, without padding; an empty one is a space, as by diffusers."""
        return self._encode_chats(
            [f"{_SYSTEM_MESSAGE}{_BEFORE_PROMPT}{prompt or ' '}" for prompt in prompts],
            END_OF_CHAT,
            self._num_system_tokens,
            self._num_system_tokens + _MAX_PROMPT_TOKENS,
            lambda tokens: self._text_outputs(tokens, use_cache=False).last_hidden_state,
        )

    def predict(
        self,
        latents_R: LatentRows,
        timesteps_R: torch.Tensor,
        conditioning: ConditioningRows,
        guidance_R: torch.Tensor | None,  # noqa: ARG002 - its guidance is not embedded
    ) -> LatentRows:
        """Return the velocity of each row, of the row's shape; rows can have different sizes."""
        sizes = [(latents_CHW.shape[1], latents_CHW.shape[2]) for latents_CHW in latents_R]
        tokens_RND = pad_sequence([latents_CHW.flatten(1).mT for latents_CHW in latents_R], batch_first=True)
        velocity_RND = self._transformer(
            tokens_RND=tokens_RND.to(self.dtype),
            timesteps_R=timesteps_R.to(self.dtype) / TRAIN_STEPS,
            texts_RTD=conditioning.tokens["encoder_hidden_states"],
            positions=self._positions(sizes, conditioning),
            mask=padding_mask([height * width for height, width in sizes], conditioning, self.device),
        )
        return image_rows(velocity_RND, latents_R, _from_tokens, 1)

    def _positions(self, sizes: Sequence[tuple[int, int]], conditioning: ConditioningRows) -> torch.Tensor:
        """Return the rotary positions [R, S, E] of rows of these sizes; [1, S, E] if they are those of all rows."""
        layouts = [*zip(conditioning.lengths, sizes, strict=True)]
        if len({*layouts}) == 1:
            layouts = layouts[:1]
        num_tokens = conditioning.tokens["encoder_hidden_states"].shape[1]
        text_TE = torch.cat([each[:num_tokens] for each in self._frequencies], dim=-1)
        images_RNE = pad_sequence([self._image_positions(length, *size) for length, size in layouts], batch_first=True)
        return torch.cat([text_TE.expand(len(layouts), -1, -1), images_RNE], dim=1)

    def _image_positions(self, frame: int, height: int, width: int) -> torch.Tensor:
        """Return [N, E] of an image after so many tokens of a prompt: rows and columns are counted from its middle."""
        of_frames, of_rows, of_columns = self._frequencies
        parts_HWE = (
            of_frames[frame],
            of_rows[_from_middle(height, self.device)][:, None],
            of_columns[_from_middle(width, self.device)],
        )
        return torch.cat([part.expand(height, width, -1) for part in parts_HWE], dim=-1).flatten(0, 1)


def _from_middle(length: int, device: torch.device) -> torch.Tensor:
    return torch.arange(length // 2 - length, length // 2, device=device)


def _from_tokens(tokens_RNC: torch.Tensor, height: int, width: int) -> torch.Tensor:
    return tokens_RNC.mT.reshape(len(tokens_RNC), -1, height, width)


def _forward(
    transformer: Any,
    *,
    tokens_RND: torch.Tensor,
    timesteps_R: torch.Tensor,
    texts_RTD: torch.Tensor,
    positions: torch.Tensor,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Return the velocity [R, N, D], as diffusers' `forward` does for rows of one layout and no other images."""
    image_RND, text_RTD = transformer.img_in(tokens_RND), transformer.txt_in(texts_RTD)
    num_tokens = text_RTD.shape[1]
    joint_RSD = torch.cat([text_RTD, image_RND], dim=1)
    is_image_S = torch.arange(joint_RSD.shape[1], device=joint_RSD.device) >= num_tokens
    # The last of R + 1 modulates the tokens of all prompts.
    times = transformer.time_text_embed(torch.cat([timesteps_R, timesteps_R.new_zeros(1)]), image_RND)
    modulation = transformer.modulation(times)
    for block in transformer.transformer_blocks:
        joint_RSD = block(
            hidden_states=joint_RSD,
            modulation=modulation,
            rotary_emb=positions,
            attention_mask=mask,
            target_token_mask=is_image_S,
            segments=num_tokens,
        )
    output: torch.Tensor = transformer.proj_out(transformer.norm_out(joint_RSD, times, is_image_S)[:, num_tokens:])
    return output


class _RowAttention:
    """Attention over the tokens of a prompt and those of an image, with positions and a mask of each row."""

    _attention_backend = None  # diffusers sets both
    _parallel_config = None

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None,
        rotary_emb: torch.Tensor,
        segments: int,
        **others: object,  # given by diffusers' blocks, which have none of them
    ) -> torch.Tensor:
        """Return the output [R, S, D]; the mask [R, 1, 1, S] hides padding, `segments` is the number of T."""
        del others

        def heads(projected: torch.Tensor) -> torch.Tensor:
            return projected.reshape(*projected.shape[:-1], attn.heads, -1)

        value = heads(attn.to_v(hidden_states))
        query = rotate(attn.norm_q(heads(attn.to_q(hidden_states))).to(value.dtype), rotary_emb)
        key = rotate(attn.norm_k(heads(attn.to_k(hidden_states))).to(value.dtype), rotary_emb)
        attend = functools.partial(
            dispatch_attention_fn, backend=self._attention_backend, parallel_config=self._parallel_config
        )
        # A prompt's padding is at its end, so no other token of it attends to that.
        of_text = attend(*(each[:, :segments] for each in (query, key, value)), is_causal=True)
        of_image = attend(query[:, segments:], key, value, attn_mask=attention_mask)
        joint: torch.Tensor = attn.to_out[0](torch.cat([of_text, of_image], dim=1).flatten(2, 3).to(query.dtype))
        return joint
