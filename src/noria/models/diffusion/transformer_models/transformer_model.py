"""What models with a transformer share: the transformer that denoises latents, and the VAE that decodes them.

Shapes: B images, T tokens of a prompt, C latent channels, H × W latent size.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from noria.config import EngineConfig
from noria.errors import ConfigError
from noria.models.diffusion.block_compilation import compile_blocks
from noria.models.diffusion.diffusion_model import InpaintingInput
from noria.models.diffusion.part_loading import unquantized_dtype
from noria.models.diffusion.vae import LatentDistribution, LatentVae
from noria.sampling.guidance import Guidance

TRAIN_STEPS = 1000
"""Of the scheduler, whose timesteps are this times the noise level."""

QWEN_CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
"""What Qwen's chat template makes of one message. A folder's own template is a program, and is not run."""


class TransformerModel:
    """The part of a `DiffusionModel` that does not depend on how prompts condition the transformer.

    The transformer predicts a velocity, or else a family has its own `clean_weights`.
    """

    vae_class: ClassVar[type[LatentVae]] = LatentVae
    inpainting: InpaintingInput | None = None

    def __init__(
        self,
        transformer: Any,
        vae: Any,
        scheduler_config: dict[str, Any],
        config: EngineConfig,
        guidance: Guidance,
        latent_channels: int,
    ) -> None:
        """Configure loaded parts by `config`, which has no "auto" left; device and dtype are those of the transformer.

        Raises:
            ConfigError: a setting does not work with these models.

        """
        if config.compile:
            raise ConfigError(
                f"engine.compile does not work with {type(self).__name__}, only with UNets: each mixture of sizes and "
                "prompt lengths would be compiled. Switch it off, or use engine.compile_blocks."
            )
        set_attention(transformer, config.attention)
        if config.compile_blocks:
            compile_blocks(transformer)
        self.scheduler_config, self.guidance = scheduler_config, guidance
        self.device: torch.device = transformer.device
        self.dtype = self.noise_dtype = unquantized_dtype(transformer)
        self._transformer = transformer
        self._latent_channels = latent_channels
        self._vae = self.vae_class(vae, config)
        self.latent_scale, self.preview_colours = self._vae.scale, self._vae.fit_preview_colours()

    def latent_shape(self, width_px: int, height_px: int) -> tuple[int, int, int]:
        """Return [C, H, W] of the latents of an image of this size."""
        return self._latent_channels, height_px // self.latent_scale, width_px // self.latent_scale

    def call_size(self, num_pixels: int) -> tuple[int, int] | None:  # noqa: ARG002
        """Return None: a call takes images of one size."""
        return None

    def clean_weights(self, timesteps_B: np.ndarray) -> np.ndarray:
        """Return the weights of input and output in a preview: x₀ = x - σ·v."""
        return np.stack([np.ones_like(timesteps_B), -timesteps_B / TRAIN_STEPS]).astype(np.float32)

    def encode(self, pixels_BHW3: torch.Tensor) -> LatentDistribution:
        """Return the latents of start images, pixels [B, height, width, 3], 0 to 255."""
        return self._vae.encode(pixels_BHW3)

    def decode(self, latents_BCHW: torch.Tensor) -> torch.Tensor:
        """Return pixels [B, height, width, 3], uint8."""
        return self._vae.decode(latents_BCHW)


def set_attention(transformer: Any, name: str) -> None:
    """Choose a transformer's implementation of attention, by a value of `engine.attention` that its family allows.

    Torch's own is chosen, too: else a variable of the environment, DIFFUSERS_ATTN_BACKEND, would.

    Raises:
        ConfigError: its package is not installed.

    """
    try:
        transformer.set_attention_backend("native" if name in ("auto", "sdpa") else name)
    except RuntimeError as error:
        raise ConfigError(f"engine.attention is {name!r}, which does not work here: {error} Or use 'auto'.") from error


def text_outputs(encoder: tuple[Any, Any], texts: Sequence[str], num_tokens: int, **options: bool) -> Any:
    """Return the outputs of a text encoder for texts, each cut or padded to so many tokens.

    `encoder` is a tokenizer with its text encoder; padding is not masked, as in diffusers' pipelines.
    """
    tokenizer, text_encoder = encoder
    tokens = tokenizer(list(texts), padding="max_length", max_length=num_tokens, truncation=True, return_tensors="pt")
    return text_encoder(tokens.input_ids.to(text_encoder.device), **options)
