"""Qwen-Image on one device: a language model's tokens and latents, joint in a transformer whose rows are ragged.

Without diffusers' pipeline, and with its numbers. What differs from Stable Diffusion:

- Conditioned on the last hidden states of Qwen2.5-VL for a prompt in a chat, without those of the system's message.
- Blocks of 2 × 2 latents are the transformer's tokens; here latents stay [C, H, W], and are packed for its call.
- Rows of a call have different sizes of images and lengths of prompts. Both are padded to the longest and masked, and
  each row has the rotary positions of its size, for which `_RowAttention` replaces diffusers' processor.
- The steps' noise levels fall evenly from 1, and the scheduler shifts them by the image's size.
- A request is guided only if it has a negative prompt, if only an empty one; tokens then get the norm of the prompt's.

Shapes: B images, R rows, T tokens of a prompt, C latent channels, H × W latent size, N tokens of an image, D numbers of
a token.
"""

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch.nn.utils.rnn import pad_sequence

from noria.config import EngineConfig
from noria.models.diffusion.conditioning import Conditioning, ConditioningRows
from noria.models.diffusion.diffusion_model import LatentRows
from noria.models.diffusion.folders.transformer_models.qwen_folder import (
    END_OF_CHAT,
    MAX_PROMPT_TOKENS,
    NUM_SYSTEM_TOKENS,
    SYSTEM_PROMPT,
)
from noria.models.diffusion.folders.transformer_models.transformer_folder import PATCH
from noria.models.diffusion.transformer_models.patches import from_tokens, to_tokens
from noria.models.diffusion.transformer_models.transformer_model import TRAIN_STEPS, TransformerModel, TransformerParts
from noria.sampling.guidance import Guidance
from noria.sampling.schedule import Schedule, evenly_falling_sigmas, shift_of_length


class QwenImage(TransformerModel):
    """The parts of one QwenImagePipeline folder, ready on a device."""

    transformer_class = "QwenImageTransformer2DModel"
    text_classes = (("Qwen2Tokenizer", "Qwen2_5_VLForConditionalGeneration"),)
    pads_right = True

    def __init__(self, parts: TransformerParts, config: EngineConfig) -> None:
        """Configure loaded parts by `config`, which has no "auto" left."""
        transformer = parts.transformer
        transformer.set_attn_processor(_RowAttention())
        guidance = Guidance(equal_norms="patches", negative_absent="unguided")
        super().__init__(parts, config, guidance, transformer.config.in_channels // PATCH**2)
        self._text_encoder = self._text_encoder.model.language_model  # its layers for images and its head are not kept
        self._pos_embed = transformer.pos_embed

    def call_size(self, num_pixels: int) -> tuple[int, int]:  # noqa: ARG002
        """Return the same for all sizes, which share calls."""
        return 0, 0

    def schedule(self, width_px: int, height_px: int, num_steps: int) -> Schedule:
        """Return evenly falling sigmas, and a shift that grows with the number of the image's tokens."""
        mu = shift_of_length(self.num_tokens(width_px, height_px), self.scheduler_config)
        return Schedule(evenly_falling_sigmas(num_steps), mu=mu, gives_flow_sigmas=True)

    def text_encode(self, prompts: Sequence[str | None]) -> list[Conditioning]:
        """Return the conditioning of each prompt, cut as by diffusers' pipeline, without padding."""
        chats = [SYSTEM_PROMPT + ("" if prompt is None else prompt) + END_OF_CHAT for prompt in prompts]
        max_length = NUM_SYSTEM_TOKENS + MAX_PROMPT_TOKENS
        tokens = self._tokenizer(chats, padding=True, max_length=max_length, truncation=True, return_tensors="pt")
        outputs = self._text_outputs(tokens, use_cache=False)
        return self._without_padding(outputs.last_hidden_state, tokens, NUM_SYSTEM_TOKENS)

    def predict(
        self,
        latents_R: LatentRows,
        timesteps_R: torch.Tensor,
        conditioning: ConditioningRows,
        guidance_R: torch.Tensor | None,  # noqa: ARG002 - its guidance is not embedded
    ) -> LatentRows:
        """Return the velocity of each row, of the row's shape; rows can have different sizes."""
        sizes = [(latents_CHW.shape[1], latents_CHW.shape[2]) for latents_CHW in latents_R]
        lengths = [height * width // PATCH**2 for height, width in sizes]
        is_mixed = not isinstance(latents_R, torch.Tensor)
        if isinstance(latents_R, torch.Tensor):
            packed_RND = to_tokens(latents_R)
        else:
            packed_RND = pad_sequence([to_tokens(latents_CHW[None])[0] for latents_CHW in latents_R], batch_first=True)
        height, width = sizes[0]
        (velocity_RND,) = self._transformer(
            hidden_states=packed_RND.to(self.dtype),
            timestep=timesteps_R.to(self.dtype) / TRAIN_STEPS,
            **conditioning.tokens,
            # What diffusers makes of this is used if all rows have this size.
            img_shapes=[[(1, height // PATCH, width // PATCH)]],
            attention_kwargs={
                "row_positions": self._positions(sizes, conditioning) if is_mixed else None,
                "row_mask": padding_mask(lengths, conditioning, self.device),
            },
            return_dict=False,
        )
        if not is_mixed:
            return from_tokens(velocity_RND, height, width)
        return [
            from_tokens(velocity_ND[None, : height * width // PATCH**2], height, width)[0]
            for velocity_ND, (height, width) in zip(velocity_RND, sizes, strict=True)
        ]

    def _positions(
        self, sizes: Sequence[tuple[int, int]], conditioning: ConditioningRows
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the rotary positions of images [R, N, …] and of texts [R, T, …] for rows of these sizes."""
        num_tokens = conditioning.tokens["encoder_hidden_states"].shape[1]
        rows = [
            self._pos_embed([[(1, height // PATCH, width // PATCH)]], max_txt_seq_len=num_tokens, device=self.device)
            for height, width in sizes
        ]
        of_images, of_texts = zip(*rows, strict=True)
        return pad_sequence(list(of_images), batch_first=True), torch.stack(of_texts)


def padding_mask(lengths: Sequence[int], conditioning: ConditioningRows, device: torch.device) -> torch.Tensor | None:
    """Return [R, 1, 1, T + N], true for what is no padding; None if nothing is. `lengths` are those of the images."""
    longest = max(lengths)
    if conditioning.mask_RT is None and min(lengths) == longest:
        return None
    lengths_R1 = torch.tensor(lengths).to(device, non_blocking=True)[:, None]
    image_RN = torch.arange(longest, device=device) < lengths_R1
    text_RT = conditioning.mask_RT
    if text_RT is None:
        num_tokens = conditioning.tokens["encoder_hidden_states"].shape[1]
        text_RT = torch.ones(len(lengths), num_tokens, dtype=torch.bool, device=device)
    return torch.cat([text_RT, image_RN], dim=1)[:, None, None]


class _RowAttention:
    """Attention over the tokens of a prompt and those of an image, with positions and a mask of each row.

    Where the positions are the same for all rows, it computes what diffusers' own processor does.
    """

    _attention_backend = None  # diffusers sets both
    _parallel_config = None

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        attention_mask: None = None,  # noqa: ARG002 - as the next, given by diffusers' blocks, which have none
        encoder_hidden_states_mask: None = None,  # noqa: ARG002
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
        row_positions: tuple[torch.Tensor, torch.Tensor] | None = None,
        row_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the outputs for the image's tokens and for the prompt's."""
        positions = row_positions or image_rotary_emb
        assert positions is not None
        of_images, of_texts = positions
        head_size = attn.inner_dim // attn.heads

        def heads(projected: torch.Tensor) -> torch.Tensor:
            return projected.reshape(*projected.shape[:-1], -1, head_size)

        query = [
            rotate(attn.norm_added_q(heads(attn.add_q_proj(encoder_hidden_states))), of_texts),
            rotate(attn.norm_q(heads(attn.to_q(hidden_states))), of_images),
        ]
        key = [
            rotate(attn.norm_added_k(heads(attn.add_k_proj(encoder_hidden_states))), of_texts),
            rotate(attn.norm_k(heads(attn.to_k(hidden_states))), of_images),
        ]
        value = [heads(attn.add_v_proj(encoder_hidden_states)), heads(attn.to_v(hidden_states))]
        joint = dispatch_attention_fn(
            *(torch.cat(each, dim=1) for each in (query, key, value)),
            attn_mask=row_mask,
            backend=self._attention_backend,
            parallel_config=self._parallel_config,
        )
        joint = joint.flatten(2, 3).to(query[0].dtype)
        num_tokens = encoder_hidden_states.shape[1]
        of_image, of_text = joint[:, num_tokens:].contiguous(), joint[:, :num_tokens].contiguous()
        return attn.to_out[0](of_image), attn.to_add_out(of_text)


def rotate(heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Return heads [R, N, heads, size], whose pairs of numbers are turned by positions [N, size / 2] or [R, N, …]."""
    turned = torch.view_as_complex(heads.float().reshape(*heads.shape[:-1], -1, 2)) * positions.unsqueeze(-2)
    return torch.view_as_real(turned).flatten(-2).type_as(heads)
