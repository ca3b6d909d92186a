"""Qwen-Image and Qwen-Image-Edit-Plus on one device: a language model's tokens and latents, joint in a transformer.

Without diffusers' pipelines, and with their numbers. What differs from Stable Diffusion:

- Conditioned on the last hidden states of Qwen2.5-VL for a prompt in a chat, without those of the system's message.
- Blocks of 2 × 2 latents are the transformer's tokens; here latents stay [C, H, W], and are packed for its call.
- Rows of a call have different sizes of images and lengths of prompts. Both are padded to the longest and masked, and
  each row has the rotary positions of its sizes, for which `_RowAttention` and `_RowPositions` replace diffusers'.
- The steps' noise levels fall evenly from 1, and the scheduler shifts them by the image's size.
- A request is guided only if it has a negative prompt, if only an empty one; tokens then get the norm of the prompt's.
- Edit-Plus is shown reference images: Qwen2.5-VL reads them with the prompt, and their tokens follow the image's.

Shapes: B images, R rows, T tokens of a prompt, C latent channels, H × W latent size, N tokens of an image and its
references, D numbers of a token.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch.nn.utils.rnn import pad_sequence

from noria.config import EngineConfig
from noria.errors import ModelError
from noria.models.diffusion.conditioning import Conditioning, ConditioningRows, ReferenceTokens, num_cut_of
from noria.models.diffusion.diffusion_model import LatentRows
from noria.models.diffusion.folders.transformer_models.qwen_folder import (
    EDIT_SYSTEM_PROMPT,
    END_OF_CHAT,
    MAX_PROMPT_TOKENS,
    NUM_EDIT_SYSTEM_TOKENS,
    NUM_SYSTEM_TOKENS,
    SYSTEM_PROMPT,
)
from noria.models.diffusion.folders.transformer_models.transformer_folder import PATCH
from noria.models.diffusion.prompts.multimodal_prompt import MultimodalPrompt
from noria.models.diffusion.transformer_models.patches import from_tokens, to_tokens
from noria.models.diffusion.transformer_models.token_rows import image_rows, reference_tokens
from noria.models.diffusion.transformer_models.transformer_model import TRAIN_STEPS, TransformerModel, TransformerParts
from noria.models.files.weights import REDOWNLOAD_HINT
from noria.sampling.guidance import Guidance
from noria.sampling.schedule import Schedule

IMAGE_TOKEN = "<|image_pad|>"  # noqa: S105
"""The place of a part of an image in a text."""

_NOT_IN_TEXTS = (IMAGE_TOKEN, "<|video_pad|>")


class QwenImage(TransformerModel):
    """The parts of one QwenImagePipeline folder, ready on a device."""

    transformer_class = "QwenImageTransformer2DModel"
    text_classes = (("Qwen2Tokenizer", "Qwen2_5_VLForConditionalGeneration"),)
    pads_right = True
    system_prompt: ClassVar[str] = SYSTEM_PROMPT
    num_system_tokens: ClassVar[int] = NUM_SYSTEM_TOKENS

    def __init__(self, parts: TransformerParts, config: EngineConfig) -> None:
        """Configure loaded parts by `config`, which has no "auto" left."""
        transformer = parts.transformer
        transformer.set_attn_processor(_RowAttention())
        transformer.pos_embed = _RowPositions(transformer.pos_embed)
        guidance = Guidance(equal_norms="patches", negative_absent="unguided")
        super().__init__(parts, config, guidance, transformer.config.in_channels // PATCH**2)
        self._text_encoder = self._kept_text_encoder(self._text_encoder.model)

    def _kept_text_encoder(self, model: Any) -> Any:
        """Return the part that encodes prompts: the layers for images, and the head, are not kept."""
        return model.language_model

    def call_size(self, num_pixels: int) -> tuple[int, int]:  # noqa: ARG002
        """Return the same for all sizes, which share calls."""
        return 0, 0

    def schedule(self, width_px: int, height_px: int, num_steps: int) -> Schedule:
        """Return evenly falling sigmas, and a shift that grows with the number of the image's tokens."""
        return self._shifted_schedule(width_px, height_px, num_steps, gives_flow_sigmas=True)

    def text_encode(self, prompts: Sequence[str | None]) -> list[Conditioning]:
        """Return the conditioning of each prompt, cut as by diffusers' pipeline, without padding."""
        chats = [self.system_prompt + ("" if prompt is None else prompt) + END_OF_CHAT for prompt in prompts]
        max_length = self.num_system_tokens + MAX_PROMPT_TOKENS
        tokens = self._tokenizer(chats, padding=True, max_length=max_length, truncation=True, return_tensors="pt")
        outputs = self._text_outputs(tokens, use_cache=False)
        return self._without_padding(outputs.last_hidden_state, tokens, self.num_system_tokens)

    def predict(
        self,
        latents_R: LatentRows,
        timesteps_R: torch.Tensor,
        conditioning: ConditioningRows,
        guidance_R: torch.Tensor | None,  # noqa: ARG002 - its guidance is not embedded
        references: Sequence[ReferenceTokens | None] = (),
    ) -> LatentRows:
        """Return the velocity of each row, of the row's shape; rows can have different sizes, and references."""
        shown = references or [None] * len(latents_R)
        shapes = [
            [_shape(*size) for size in (latents_CHW.shape[1:], *(reference.sizes if reference else ()))]
            for latents_CHW, reference in zip(latents_R, shown, strict=True)
        ]
        lengths = [sum(map(math.prod, of_row)) for of_row in shapes]
        if isinstance(latents_R, torch.Tensor) and not references:
            packed_RND = to_tokens(latents_R)
        else:
            packed_RND = pad_sequence([*map(_row_tokens, latents_R, shown)], batch_first=True)
        longest = packed_RND.shape[1]
        (velocity_RND,) = self._transformer(
            hidden_states=packed_RND.to(self.dtype),
            timestep=timesteps_R.to(self.dtype) / TRAIN_STEPS,
            **conditioning.tokens,
            img_shapes=[
                [*of_row, _Padding((1, 1, longest - length))] for of_row, length in zip(shapes, lengths, strict=True)
            ],
            attention_kwargs={"row_mask": padding_mask(lengths, conditioning, self.device)},
            return_dict=False,
        )
        return image_rows(velocity_RND, latents_R, from_tokens, PATCH**2)


class QwenImageEditPlus(QwenImage):
    """The parts of one QwenImageEditPlusPipeline folder, ready on a device."""

    system_prompt = EDIT_SYSTEM_PROMPT
    num_system_tokens = NUM_EDIT_SYSTEM_TOKENS

    def _kept_text_encoder(self, model: Any) -> Any:
        self._read_images = image_reader(self._tokenizer, model)
        return model

    def text_encode(self, prompts: Sequence[str | MultimodalPrompt | None]) -> list[Conditioning]:
        """Return the conditioning of each prompt, without padding; those with images are encoded one by one."""
        return encode_each(prompts, super().text_encode, self._encode)

    def _encode(self, prompt: MultimodalPrompt) -> Conditioning:
        read = self._read_images(images=list(prompt.pixels), return_tensors="pt")
        lengths = (read.image_grid_thw.prod(1) // self._read_images.merge_size**2).tolist()
        pictures = "".join(
            f"Picture {number}: <|vision_start|>{IMAGE_TOKEN * length}<|vision_end|>"
            for number, length in enumerate(lengths, start=1)
        )
        text = self._tokenizer(
            without_images(prompt.text), truncation=True, max_length=MAX_PROMPT_TOKENS, add_special_tokens=False
        )
        before, after = self._tokenizer([self.system_prompt + pictures, END_OF_CHAT]).input_ids
        encoder = self._text_encoder
        input_ids = torch.tensor([before + text.input_ids + after], device=encoder.device)
        # Without the types of tokens, as by the pipeline: a part of an image has the place of a token of text.
        outputs = encoder(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            pixel_values=read.pixel_values.to(encoder.device, encoder.dtype),
            image_grid_thw=read.image_grid_thw.to(encoder.device),
            use_cache=False,
        )
        tokens_TD = outputs.last_hidden_state[0, self.num_system_tokens :].to(self.device, self.dtype)
        return Conditioning({"encoder_hidden_states": tokens_TD}, num_cut=num_cut_of(text)[0])

    def encode_references(self, pixels: Sequence[torch.Tensor]) -> ReferenceTokens:
        """Return the tokens of reference images, the modes of the VAE's distributions."""
        latents = [self.encode(pixels_HW3[None]).mean_BCHW for pixels_HW3 in pixels]
        return reference_tokens(latents, to_tokens)


def image_reader(tokenizer: Any, model: Any, **options: Any) -> Any:
    """Return what makes the inputs of a text encoder of images. Raises ModelError: the tokenizer is another's."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    if (got := tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)) != (wanted := model.config.image_token_id):
        raise ModelError(
            f"the tokenizer's {IMAGE_TOKEN} is token {got}, but image_token_id of the text encoder is {wanted}: "
            f"the parts belong to two models. {REDOWNLOAD_HINT}"
        )
    vision = model.config.vision_config
    return Qwen2VLImageProcessorPil(
        patch_size=vision.patch_size,
        merge_size=vision.spatial_merge_size,
        temporal_patch_size=vision.temporal_patch_size,
        **options,
    )


def encode_each(
    prompts: Sequence[str | MultimodalPrompt | None],
    encode_texts: Callable[[Sequence[str]], list[Conditioning]],
    encode: Callable[[MultimodalPrompt], Conditioning],
) -> list[Conditioning]:
    """Return the conditioning of each prompt: texts are encoded together, those with images one by one."""
    texts = [prompt for prompt in dict.fromkeys(prompts) if not isinstance(prompt, MultimodalPrompt)]
    found: dict[str | MultimodalPrompt | None, Conditioning] = {}
    if texts:
        found |= zip(texts, encode_texts([without_images(text) for text in texts]), strict=True)
    found |= {prompt: encode(prompt) for prompt in dict.fromkeys(prompts) if isinstance(prompt, MultimodalPrompt)}
    return [found[prompt] for prompt in prompts]


def without_images(text: str | None) -> str:
    """Return a text without the tokens of images, of which it has none."""
    text = text or ""
    while any(token in text for token in _NOT_IN_TEXTS):
        for token in _NOT_IN_TEXTS:
            text = text.replace(token, "")
    return text


class _Padding(tuple[int, int, int]):
    """The shape of what a row is padded with, in the form of an image's: it has no positions."""

    __slots__ = ()


def _shape(height: int, width: int) -> tuple[int, int, int]:
    """Return frames, rows and columns of an image's tokens."""
    return 1, height // PATCH, width // PATCH


def _row_tokens(latents_CHW: torch.Tensor, reference: ReferenceTokens | None) -> torch.Tensor:
    tokens_ND = to_tokens(latents_CHW[None])[0]
    return tokens_ND if reference is None else torch.cat([tokens_ND, reference.tokens_MD.to(tokens_ND.dtype)])


class _RowPositions(torch.nn.Module):
    """Returns the rotary positions of images and texts: [N, …] and [T, …], or [R, N, …] if those of rows differ."""

    def __init__(self, inner: Any) -> None:
        """`inner` is the transformer's own layer, for one row."""
        super().__init__()
        self._inner = inner

    def forward(self, img_shapes: Any, max_txt_seq_len: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return both, for rows of images of these shapes, [frames, rows, columns] each."""
        rows = [[shape for shape in of_row if not isinstance(shape, _Padding)] for of_row in img_shapes]
        if all(each == rows[0] for each in rows):
            return self._inner(rows[:1], max_txt_seq_len=max_txt_seq_len, device=device)  # type: ignore[no-any-return]
        found = [self._inner([each], max_txt_seq_len=max_txt_seq_len, device=device) for each in rows]
        of_images, of_texts = zip(*found, strict=True)
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
        row_mask: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the outputs for the image's tokens and for the prompt's."""
        assert image_rotary_emb is not None
        of_images, of_texts = image_rotary_emb
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
