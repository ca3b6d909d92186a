"""Qwen-Image 2.1 on one device: the tokens of a prompt and then those of an image, in one sequence of a transformer.

Without diffusers' pipeline, and with its numbers. What differs from Qwen-Image:

- Conditioned on the outputs of the last layer of Qwen3-VL before its norm, for a prompt in a chat, without those of the
  system's message.
- A token of the prompt attends to those before it, one of the image to all. The first are modulated as at time 0.
- Reference images stand in the prompt: Qwen3-VL reads them there, and the transformer has their latents in the places
  of what it read. Such a token attends to those of its image and to all before these.
- A latent is a token. The VAE has a channel for opacity.
- Rows of a call have different sizes of images and lengths of prompts: both are padded to the longest, and the image's
  padding and that of the prompt are hidden from the image. `_forward` and `_RowAttention` replace diffusers', which
  have one layout for all rows.
- Guidance is u + g·(c - u), and a request is guided only if it has a negative prompt.

Shapes: R rows, T tokens of a prompt, M those of its images, P = T + M, N tokens of an image, S = P + N, C latent
channels, H × W latent size, D numbers of a token, E half of an attention head.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn
from torch.nn.utils.rnn import pad_sequence

from noria.config import EngineConfig
from noria.errors import ModelError
from noria.models.diffusion.conditioning import Conditioning, ConditioningRows, ReferenceTokens, num_cut_of
from noria.models.diffusion.diffusion_model import LatentRows
from noria.models.diffusion.folders.transformer_models.qwen_folder import END_OF_CHAT
from noria.models.diffusion.folders.transformer_models.qwen_image_21_folder import Qwen21Index
from noria.models.diffusion.prompts.multimodal_prompt import MultimodalPrompt
from noria.models.diffusion.transformer_models.qwen_image import (
    IMAGE_TOKEN,
    encode_each,
    image_reader,
    padding_mask,
    rotate,
    without_images,
)
from noria.models.diffusion.transformer_models.token_rows import Sizes, image_rows, reference_tokens
from noria.models.diffusion.transformer_models.transformer_model import TRAIN_STEPS, TransformerModel, TransformerParts
from noria.models.diffusion.vae import LatentVae, OpaqueVae
from noria.models.files.weights import REDOWNLOAD_HINT, read_struct
from noria.sampling.guidance import Guidance
from noria.sampling.schedule import Schedule, evenly_falling_sigmas, shift_of_length

_SYSTEM_MESSAGE = "<|im_start|>system\nComprehend and analyze the provided prompt.<|im_end|>\n"
_BEFORE_PROMPT = "<|im_start|>user\n"
_MAX_PROMPT_TOKENS = 1024  # with `_BEFORE_PROMPT`; the pipeline has no limit
_READ_PX = 32  # sides of a part of an image that the text encoder reads: four of the transformer's tokens
_AFTER_ALL = 2**31 - 1  # the place of padding


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
        vision = self._text_encoder.config.vision_config
        if (got := vision.patch_size * vision.spatial_merge_size) != _READ_PX:
            raise ModelError(
                f"{parts.spec.path / 'text_encoder' / 'config.json'}: it reads images in parts of {got} pixels; "
                f"supported are {_READ_PX}. {REDOWNLOAD_HINT}"
            )
        halves = [0.5] * 3
        # Pixels come in the sizes of the pipeline.
        self._read_images = image_reader(
            self._tokenizer, self._text_encoder, image_mean=halves, image_std=halves, do_resize=False
        )
        self._text_encoder.language_model.norm = torch.nn.Identity()
        texts = [_before_image(number) for number in range(parts.spec.max_references)]
        self._num_before_images = [len(ids) for ids in self._tokenizer(texts).input_ids]
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

    def text_encode(self, prompts: Sequence[str | MultimodalPrompt | None]) -> list[Conditioning]:
        """Return the conditioning of each prompt, without padding; an empty one is a space, as by diffusers.

        That of a prompt with images has no tokens for these.
        """
        return encode_each(prompts, self._encode_texts, self._encode)

    def _encode_texts(self, prompts: Sequence[str]) -> list[Conditioning]:
        return self._encode_chats(
            [f"{_SYSTEM_MESSAGE}{_BEFORE_PROMPT}{prompt or ' '}" for prompt in prompts],
            END_OF_CHAT,
            self._num_system_tokens,
            self._num_system_tokens + _MAX_PROMPT_TOKENS,
            lambda tokens: self._text_outputs(tokens, use_cache=False).last_hidden_state,
        )

    def _encode(self, prompt: MultimodalPrompt) -> Conditioning:
        read = self._read_images(images=list(prompt.pixels), return_tensors="pt")
        lengths = (read.image_grid_thw.prod(1) // self._read_images.merge_size**2).tolist()
        pictures = [f"{_before_image(k)}{IMAGE_TOKEN * length}" for k, length in enumerate(lengths)]
        before, after = self._tokenizer([f"{_SYSTEM_MESSAGE}{''.join(pictures)}<|vision_end|>", END_OF_CHAT]).input_ids
        text = self._tokenizer(without_images(prompt.text) or " ", truncation=True, max_length=_MAX_PROMPT_TOKENS)
        encoder = self._text_encoder
        input_ids = torch.tensor([before + text.input_ids + after], device=encoder.device)
        is_image = input_ids == encoder.config.image_token_id
        outputs = encoder(
            input_ids=input_ids,
            attention_mask=torch.ones_like(input_ids),
            pixel_values=read.pixel_values.to(encoder.device, encoder.dtype),
            image_grid_thw=read.image_grid_thw.to(encoder.device),
            mm_token_type_ids=is_image.int(),
            use_cache=False,
        )
        is_kept = ~is_image[0]
        is_kept[: self._num_system_tokens] = False
        tokens_TD = outputs.last_hidden_state[0, is_kept].to(self.device, self.dtype)
        return Conditioning({"encoder_hidden_states": tokens_TD}, num_cut=num_cut_of(text)[0])

    def encode_references(self, pixels: Sequence[torch.Tensor]) -> ReferenceTokens:
        """Return the tokens of reference images, the modes of the VAE's distributions."""
        return reference_tokens(
            [self.encode(pixels_HW3[None]).mean_BCHW for pixels_HW3 in pixels],
            lambda latents_BCHW: latents_BCHW.flatten(2).mT,
        )

    def predict(
        self,
        latents_R: LatentRows,
        timesteps_R: torch.Tensor,
        conditioning: ConditioningRows,
        guidance_R: torch.Tensor | None,  # noqa: ARG002 - its guidance is not embedded
        references: Sequence[ReferenceTokens | None] = (),
    ) -> LatentRows:
        """Return the velocity of each row, of the row's shape; rows can have different sizes, and references."""
        sizes = [(latents_CHW.shape[1], latents_CHW.shape[2]) for latents_CHW in latents_R]
        tokens_RND = pad_sequence([latents_CHW.flatten(1).mT for latents_CHW in latents_R], batch_first=True)
        lengths = [height * width for height, width in sizes]
        inputs: dict[str, Any]
        if references:
            inputs = self._with_references(sizes, references, conditioning)
            is_image_RN = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
            is_prefix_RP = inputs.pop("places_RP") < _AFTER_ALL
            inputs["mask"] = torch.cat([is_prefix_RP, is_image_RN.to(self.device)], dim=1)[:, None, None]
        else:
            inputs = {
                "positions": self._positions(sizes, conditioning),
                "mask": padding_mask(lengths, conditioning, self.device),
            }
        velocity_RND = self._transformer(
            tokens_RND=tokens_RND.to(self.dtype),
            timesteps_R=timesteps_R.to(self.dtype) / TRAIN_STEPS,
            texts_RTD=conditioning.tokens["encoder_hidden_states"],
            **inputs,
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

    def _with_references(
        self,
        sizes: Sequence[tuple[int, int]],
        references: Sequence[ReferenceTokens | None],
        conditioning: ConditioningRows,
    ) -> dict[str, Any]:
        """Return the references [R, M, C], the positions [R, S, E], the places [R, P] and what tokens attend to.

        The place of a token is its number in the prompt; all of an image have the one of its first.
        """
        num_tokens = conditioning.tokens["encoder_hidden_states"].shape[1]
        none_0C = torch.zeros(0, self._transformer.config.in_channels, dtype=self.dtype, device=self.device)
        tokens_RMC = pad_sequence(
            [none_0C if each is None else each.tokens_MD.to(self.dtype) for each in references], batch_first=True
        )
        of_texts, of_references, of_images, places, shown_R = [], [], [], [], []
        for reference, length, size in zip(references, conditioning.lengths, sizes, strict=True):
            shown = () if reference is None else reference.sizes
            layout = self._layout(length, num_tokens, shown)
            frames_T = layout.frames_T.to(self.device)
            of_texts.append(torch.cat([each[frames_T] for each in self._frequencies], dim=-1))
            *of_shown, of_image = [
                self._image_positions(frame, *each) for frame, each in zip(layout.frames, (*shown, size), strict=True)
            ]
            of_references.append(torch.cat([of_image[:0], *of_shown]))
            of_images.append(of_image)
            places.append(layout.places_P)
            shown_R.append(layout.shown)
        places_RP = pad_sequence(places, batch_first=True, padding_value=_AFTER_ALL).to(self.device)
        images = (pad_sequence(each, batch_first=True) for each in (of_references, of_images))
        # Numbers, which attention does not convert in each block, as it does truths.
        hidden_RTP = places_RP[:, None] > places_RP[:, :num_tokens, None]
        mask_RTP = torch.zeros(hidden_RTP.shape, dtype=self.dtype, device=self.device)
        return {
            "references_RMC": tokens_RMC,
            "positions": torch.cat([torch.stack(of_texts), *images], dim=1),
            "places_RP": places_RP,
            "prefix": _Prefix(mask_RTP.masked_fill_(hidden_RTP, -torch.inf)[:, None], shown_R),
        }

    def _layout(self, length: int, num_tokens: int, sizes: Sizes) -> "_Layout":
        """Return that of a prompt of so many tokens, padded to `num_tokens`, with images of these sizes."""
        frames_T, places_T = torch.arange(num_tokens), torch.arange(num_tokens)
        places_T[length:] = _AFTER_ALL
        frames, places, shown, start, frame, num_before = [], [], [], 0, 0, 0
        for (height, width), before in zip(sizes, self._num_before_images, strict=False):
            start += before
            frames.append(start + frame)
            places.append(torch.full((height * width,), start + num_before))
            shown.append(_Shown(start, num_before, num_before + height * width))
            frame, num_before = frame + max(height, width), num_before + height * width
            frames_T[start:] += max(height, width)
            places_T[start:length] += height * width
        return _Layout(frames_T, torch.cat([places_T, *places]), [*frames, length + frame], shown)

    def _image_positions(self, frame: int, height: int, width: int) -> torch.Tensor:
        """Return [N, E] of an image after so many tokens of a prompt: rows and columns are counted from its middle."""
        of_frames, of_rows, of_columns = self._frequencies
        parts_HWE = (
            of_frames[frame],
            of_rows[_from_middle(height, self.device)][:, None],
            of_columns[_from_middle(width, self.device)],
        )
        return torch.cat([part.expand(height, width, -1) for part in parts_HWE], dim=-1).flatten(0, 1)


class _Shown(NamedTuple):
    """A reference image of a row: its tokens attend to each other, and to those of the text and images before it."""

    num_texts: int  # tokens of the text before it
    first: int  # place in M
    end: int


class _Prefix(NamedTuple):
    """The tokens that those of prompts with images attend to."""

    mask: torch.Tensor  # additive [R, 1, T, P], for the tokens of texts
    shown: list[list[_Shown]]  # images of each row, which need no mask, which would be as large as P squared


class _Layout(NamedTuple):
    """The order of a prompt and its images."""

    frames_T: torch.Tensor  # positions of the prompt's tokens
    places_P: torch.Tensor  # places of those and of the images'
    frames: list[int]  # positions of its images, and of the one that is made
    shown: list[_Shown]


def _before_image(number: int) -> str:
    """Return the text between the image before this one, or the system's message, and it."""
    return f"{'<|vision_end|> ' if number else _BEFORE_PROMPT}<image{number + 1}><|vision_start|>"


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
    references_RMC: torch.Tensor | None = None,
    prefix: _Prefix | None = None,
) -> torch.Tensor:
    """Return the velocity [R, N, D], as diffusers' `forward` does for rows of one layout.

    Tokens of reference images stand behind those of the prompt: `positions` and `prefix` say their places.
    """
    images = tokens_RND if references_RMC is None else torch.cat([references_RMC, tokens_RND], dim=1)
    image_RND, text_RTD = transformer.img_in(images), transformer.txt_in(texts_RTD)
    joint_RSD = torch.cat([text_RTD, image_RND], dim=1)
    num_tokens = joint_RSD.shape[1] - tokens_RND.shape[1]
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
            key_valid=prefix,
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
        key_valid: _Prefix | None,
        **others: object,  # given by diffusers' blocks, which have none of them
    ) -> torch.Tensor:
        """Return the output [R, S, D]; the mask [R, 1, 1, S] hides padding, `segments` is the number of P.

        `key_valid` says what the tokens of prompts with images attend to.
        """
        del others

        def heads(projected: torch.Tensor) -> torch.Tensor:
            return projected.reshape(*projected.shape[:-1], attn.heads, -1)

        value = heads(attn.to_v(hidden_states))
        query = rotate(attn.norm_q(heads(attn.to_q(hidden_states))).to(value.dtype), rotary_emb)
        key = rotate(attn.norm_k(heads(attn.to_k(hidden_states))).to(value.dtype), rotary_emb)
        attend = functools.partial(
            dispatch_attention_fn, backend=self._attention_backend, parallel_config=self._parallel_config
        )
        of_prefix = query[:, :segments], key[:, :segments], value[:, :segments]
        # A prompt's padding is at its end, so no other token of it attends to that.
        of_text = attend(*of_prefix, is_causal=True) if key_valid is None else _attend(attend, *of_prefix, key_valid)
        of_image = attend(query[:, segments:], key, value, attn_mask=attention_mask)
        joint: torch.Tensor = attn.to_out[0](torch.cat([of_text, of_image], dim=1).flatten(2, 3).to(query.dtype))
        return joint


def _attend(
    attend: Callable[..., torch.Tensor],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    prefix: _Prefix,
) -> torch.Tensor:
    """Return the outputs [R, P, heads, …] of prompts with images; zeros where a row has fewer tokens of these."""
    num_texts = prefix.mask.shape[2]
    of_texts = attend(query[:, :num_texts], key, value, attn_mask=prefix.mask)
    of_images = torch.zeros_like(query[:, num_texts:])
    for row, shown in enumerate(prefix.shown):
        for each in shown:
            seen = [
                torch.cat([part[row, : each.num_texts], part[row, num_texts : num_texts + each.end]])[None]
                for part in (key, value)
            ]
            queries = query[row, num_texts + each.first : num_texts + each.end][None]
            of_images[row, each.first : each.end] = attend(queries, *seen)[0]
    return torch.cat([of_texts, of_images.to(of_texts.dtype)], dim=1)
