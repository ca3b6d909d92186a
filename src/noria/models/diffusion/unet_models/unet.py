"""A UNet2DConditionModel as the denoiser of a family: memory format, attention, compilation, and its call.

Shapes: R rows of a call (two for a guided image), C latent channels, H × W latent size.
"""

from typing import Any

import numpy as np
import torch

from noria.config import EngineConfig
from noria.errors import ConfigError
from noria.models.diffusion.block_compilation import compile_blocks
from noria.models.diffusion.conditioning import ConditioningRows
from noria.models.diffusion.part_loading import unquantized_dtype
from noria.models.diffusion.unet_models.graphed_calls import GraphedCalls
from noria.sampling.previews import alpha_bars, clean_weights


class DenoisingUnet:
    """A loaded UNet, called by rows; device and dtype are its own."""

    def __init__(self, unet: Any, scheduler_config: dict[str, Any], config: EngineConfig) -> None:
        """`scheduler_config` says the noise schedule and what the UNet predicts; `config` has no "auto" left."""
        self._memory_format = memory_format(config)
        configure(unet, config)
        if config.compile_blocks:
            compile_blocks(unet)
        self._dtype = unquantized_dtype(unet)
        self._unet = torch.compile(unet, dynamic=False) if config.compile else unet
        if config.cuda_graphs and unet.device.type == "cuda":
            self._unet = GraphedCalls(self._unet, unet.device)
        self._guidance_width: int | None = unet.config.time_cond_proj_dim
        self._alpha_bars = alpha_bars(scheduler_config)
        self._prediction_type: str = scheduler_config.get("prediction_type", "epsilon")

    def predict(
        self,
        latents_RCHW: torch.Tensor,
        timesteps_R: torch.Tensor,
        conditioning: ConditioningRows,
        guidance_R: torch.Tensor | None,
        **others: Any,
    ) -> torch.Tensor:
        """Return the raw output [R, C, H, W], of the kind that the model predicts; it is valid until the next call.

        `guidance_R` are the scales for a UNet that is guided by their embedding, else None; `others` go to the UNet.
        """
        latents_RCHW = latents_RCHW.to(self._dtype).contiguous(memory_format=self._memory_format)
        outputs = self._unet(
            latents_RCHW,
            timesteps_R,
            **conditioning.tokens,
            encoder_attention_mask=conditioning.mask_RT,
            timestep_cond=self._guidance_embedding(guidance_R),
            **others,
            return_dict=False,
        )
        output_RCHW: torch.Tensor = outputs[0]
        return output_RCHW

    def _guidance_embedding(self, guidance_R: torch.Tensor | None) -> torch.Tensor | None:
        """Return [R, time_cond_proj_dim] of w = g - 1 (Luo et al., 2023), as the pipelines of diffusers embed it."""
        if guidance_R is None:
            return None
        assert self._guidance_width is not None
        half = self._guidance_width // 2
        # In the order of diffusers' operations: angles are thousands of radians, and so would be their rounding.
        exponent = torch.log(torch.tensor(10000.0)) / (half - 1)
        frequencies = torch.exp(torch.arange(half, dtype=torch.float32) * -exponent).to(guidance_R.device)
        angles = ((guidance_R - 1) * 1000)[:, None] * frequencies[None]
        embedding = torch.cat([angles.sin(), angles.cos()], dim=1).to(self._dtype)
        return torch.nn.functional.pad(embedding, (0, self._guidance_width % 2))

    def clean_weights(self, timesteps_B: np.ndarray) -> np.ndarray:
        """Return the weights of input and output in a preview; see `clean_weights` in `sampling/previews.py`."""
        return clean_weights(timesteps_B, self._alpha_bars, self._prediction_type)


def memory_format(config: EngineConfig) -> torch.memory_format:
    """Return how the weights and inputs of convolutions are laid out."""
    return torch.channels_last if config.channels_last else torch.contiguous_format


def configure(part: Any, config: EngineConfig) -> None:
    """Lay out a UNet's or a ControlNet's weights, and choose its attention, as `config` says.

    Raises ConfigError: as `set_attention`.
    """
    part.to(memory_format=memory_format(config))
    set_attention(part, config.attention)


def set_attention(unet: Any, kind: str) -> None:
    """Choose the UNet's implementation of attention, by the values of `engine.attention`.

    Raises ConfigError: xformers is not installed or does not work on this device.
    """
    if kind in ("auto", "sdpa"):  # torch's scaled_dot_product_attention, diffusers' default
        from diffusers.models.attention_processor import AttnProcessor2_0

        unet.set_attn_processor(AttnProcessor2_0())
    elif kind == "plain":
        from diffusers.models.attention_processor import AttnProcessor

        unet.set_attn_processor(AttnProcessor())
    elif kind == "sliced":
        unet.set_attention_slice("auto")
    elif kind == "xformers":
        try:
            unet.enable_xformers_memory_efficient_attention()
        except (ImportError, ModuleNotFoundError, ValueError) as error:
            raise ConfigError(
                f"engine.attention is 'xformers', which does not work here: {error}. Use 'sdpa'."
            ) from error
    else:
        raise AssertionError(kind)
