"""The base of models with a transformer: the part that denoises latents, how it is loaded, and its text encoders.

Shapes: B images or prompts, T tokens of a prompt, C latent channels, H × W latent size.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch

from noria.config import EngineConfig
from noria.errors import ConfigError
from noria.models.diffusion.block_compilation import compile_blocks
from noria.models.diffusion.conditioning import Conditioning, num_cut_of
from noria.models.diffusion.folders.transformer_models.transformer_folder import PATCH
from noria.models.diffusion.latent_model import LatentModel
from noria.models.diffusion.part_loading import (
    load_denoiser,
    load_scheduler_config,
    load_text_encoder,
    load_vae,
    loading,
    make_streamer,
    text_encoder_placement,
)
from noria.protocol.diffusion import DiffusionModelSpec
from noria.sampling.guidance import CLASSIFIER_FREE, Guidance
from noria.sampling.schedule import Schedule, evenly_falling_sigmas, shift_of_length

TRAIN_STEPS = 1000
"""Of the scheduler, whose timesteps are this times the noise level."""

QWEN_CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
"""A message in Qwen's chat template. A folder's own template is a program, and is not run."""


@dataclass(frozen=True, slots=True)
class TransformerParts:
    """The loaded parts of a folder."""

    spec: DiffusionModelSpec
    text_encoders: tuple[tuple[Any, Any], ...]  # tokenizers with their text encoders
    transformer: Any
    vae: Any
    scheduler_config: dict[str, Any]


class TransformerModel(LatentModel):
    """The part of a `DiffusionModel` that does not depend on how prompts condition the transformer.

    The transformer predicts a velocity, or else a family has its own `clean_weights`.
    """

    transformer_class: ClassVar[str]  # a class of diffusers
    text_classes: ClassVar[tuple[tuple[str, str], ...]]  # classes of transformers: tokenizer and model of each
    pads_right: ClassVar[bool] = False  # tokenizers pad at the end, whatever their files say
    vae_may_overflow: ClassVar[bool] = False  # in float16

    def __init__(
        self,
        parts: TransformerParts,
        config: EngineConfig,
        guidance: Guidance = CLASSIFIER_FREE,
        latent_channels: int | None = None,
    ) -> None:
        """Configure loaded parts by `config`, which has no "auto" left; device and dtype are those of the transformer.

        By default `latent_channels` are the inputs of the transformer.

        Raises ConfigError: a setting does not work with these models.
        """
        if config.compile:
            raise ConfigError(
                f"engine.compile does not work with {type(self).__name__}, only with UNets: each mixture of sizes and "
                "prompt lengths would be compiled. Switch it off, or use engine.compile_blocks."
            )
        transformer = self._transformer = parts.transformer
        set_attention(transformer, config.attention)
        if config.compile_blocks:
            compile_blocks(transformer)
        channels = transformer.config.in_channels if latent_channels is None else latent_channels
        super().__init__(transformer, parts.vae, parts.scheduler_config, config, guidance, channels)
        self.lora_parts: Mapping[str, torch.nn.Module] = {"transformer": transformer}
        self._tokenizer, self._text_encoder = parts.text_encoders[0]

    @classmethod
    def load(cls, spec: DiffusionModelSpec, config: EngineConfig, device: str) -> Self:
        """Read the parts of `spec.folder` onto `device`.

        Raises:
            ConfigError: a setting does not work with this family.
            ModelError: diffusers or transformers cannot read a part; the message contains their reason.
        """
        placement, streamer = text_encoder_placement(config, device), make_streamer(config, device)
        options: dict[str, Any] = {"padding_side": "right"} if cls.pads_right else {}
        with loading(spec):
            import diffusers
            import transformers

            text_encoders = tuple(
                load_text_encoder(
                    (getattr(transformers, tokenizer), getattr(transformers, text_encoder)),
                    spec,
                    f"_{number}" if number > 1 else "",
                    *placement,
                    streamer,
                    **options,
                )
                for number, (tokenizer, text_encoder) in enumerate(cls.text_classes, start=1)
            )
            transformer = load_denoiser(getattr(diffusers, cls.transformer_class), spec, config, device, streamer)
            vae = load_vae(spec, config, device, streamer, may_overflow=cls.vae_may_overflow)
            return cls(TransformerParts(spec, text_encoders, transformer, vae, load_scheduler_config(spec)), config)

    def num_tokens(self, width_px: int, height_px: int) -> int:
        """Return the number of an image's tokens, blocks of 2 × 2 latents."""
        _, height, width = self.latent_shape(width_px, height_px)
        return height // PATCH * (width // PATCH)

    def _shifted_schedule(self, width_px: int, height_px: int, num_steps: int, *, gives_flow_sigmas: bool) -> Schedule:
        """Return evenly falling sigmas, and a shift that grows with the number of the image's tokens."""
        mu = shift_of_length(self.num_tokens(width_px, height_px), self.scheduler_config)
        return Schedule(evenly_falling_sigmas(num_steps), mu=mu, gives_flow_sigmas=gives_flow_sigmas)

    def clean_weights(self, timesteps_B: np.ndarray) -> np.ndarray:
        """Return the weights of input and output in a preview: x₀ = x - σ·v."""
        return np.stack([np.ones_like(timesteps_B), -timesteps_B / TRAIN_STEPS]).astype(np.float32)

    def _text_outputs(self, tokens: Any, **options: bool) -> Any:
        """Return the outputs of the text encoder, which does not attend to padding."""
        device = self._text_encoder.device
        return self._text_encoder(
            input_ids=tokens.input_ids.to(device), attention_mask=tokens.attention_mask.to(device), **options
        )

    def _conditioned(
        self, tokens_BTD: torch.Tensor, num_cut: Sequence[int], vectors: Mapping[str, torch.Tensor] | None = None
    ) -> list[Conditioning]:
        """Return the conditioning of prompts that all have as many tokens; `vectors` [B, …] are theirs, too."""
        tokens_BTD = tokens_BTD.to(self.device, self.dtype)
        placed = {name: each.to(self.device, self.dtype) for name, each in (vectors or {}).items()}
        return [
            Conditioning({"encoder_hidden_states": tokens_TD}, {name: each[b] for name, each in placed.items()}, cut)
            for b, (tokens_TD, cut) in enumerate(zip(tokens_BTD, num_cut, strict=True))
        ]

    def _without_padding(
        self, outputs_BTD: torch.Tensor, tokens: Any, start: int = 0, name: str = "encoder_hidden_states"
    ) -> list[Conditioning]:
        """Return the conditioning of each prompt: its outputs from `start` to the padding at the end."""
        lengths = tokens.attention_mask.sum(1).tolist()
        return [
            Conditioning({name: output_TD[start:length]}, num_cut=num_cut)
            for output_TD, length, num_cut in zip(
                outputs_BTD.to(self.device, self.dtype), lengths, num_cut_of(tokens), strict=True
            )
        ]

    def _encode_chats(
        self, texts: Sequence[str], end: str, start: int, max_length: int, encode: Callable[[Any], torch.Tensor]
    ) -> list[Conditioning]:
        """Return the conditioning of chats: texts of at most `max_length` tokens, longer ones are cut, before `end`.

        `encode` returns outputs [B, T, …] of tokens; those before `start` are dropped.
        """
        end_ids = self._tokenizer(end).input_ids
        cut = self._tokenizer(list(texts), max_length=max_length, truncation=True)
        tokens = self._tokenizer.pad({"input_ids": [ids + end_ids for ids in cut.input_ids]}, return_tensors="pt")
        rows = self._without_padding(encode(tokens), tokens, start)
        return [replace(row, num_cut=num_cut) for row, num_cut in zip(rows, num_cut_of(cut), strict=True)]


def set_attention(transformer: Any, name: str) -> None:
    """Choose a transformer's implementation of attention, by a value of `engine.attention` that its family allows.

    Torch's own is chosen, too: else a variable of the environment, DIFFUSERS_ATTN_BACKEND, would. Other models of the
    process keep theirs: diffusers makes the chosen one the default of the process, which is restored here.

    Raises ConfigError: its package is not installed.
    """
    from diffusers import attention_backend

    try:
        with attention_backend("native"):
            transformer.set_attention_backend("native" if name in ("auto", "sdpa") else name)
    except RuntimeError as error:
        raise ConfigError(f"engine.attention is {name!r}, which does not work here: {error} Or use 'auto'.") from error


def text_outputs(
    encoder: tuple[Any, Any], texts: Sequence[str], num_tokens: int, **options: bool
) -> tuple[Any, list[int]]:
    """Return the outputs of a text encoder for texts, each cut or padded to so many tokens, and how many were cut.

    `encoder` is a tokenizer with its text encoder; padding is not masked, as in diffusers' pipelines.
    """
    tokenizer, text_encoder = encoder
    tokens = tokenizer(list(texts), padding="max_length", max_length=num_tokens, truncation=True, return_tensors="pt")
    return text_encoder(tokens.input_ids.to(text_encoder.device), **options), num_cut_of(tokens)
