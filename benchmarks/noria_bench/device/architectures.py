"""The measured UNets, built from the published architectures with random weights, which take as long as trained ones.

SD1.5: Rombach et al., 2022, "High-Resolution Image Synthesis with Latent Diffusion Models" (860 M parameters, CLIP
ViT-L text of 768).

SDXL: Podell et al., 2023, table 1 (2.6 B parameters, two text encoders of 2,048 together, sizes and pooled text
embedded with the time).

Shapes: R rows (inputs of the UNet; a guided image has two), C × H × W latents, T tokens, D text width.
"""

import functools
import json
import pathlib
from dataclasses import dataclass, field
from typing import Any

import torch

import noria

_CLIP_TOKENS = 77
# SDXL's pooled text, and its original size, crop and target size.
_POOLED_WIDTH, _NUM_TIME_IDS = 1280, 6


@dataclass(frozen=True)
class Architecture:
    """One UNet and its usual settings."""

    name: str
    config: dict[str, Any] = field(hash=False)  # of diffusers' UNet2DConditionModel
    default_steps: int  # of a guided image, so each has two rows
    latent_scale: int = 8  # pixels of a side per latent
    num_tokens: int = _CLIP_TOKENS

    @property
    def has_pooled_text(self) -> bool:
        """Whether the UNet also takes sizes and a pooled text."""
        return self.config.get("addition_embed_type") == "text_time"


SD15 = Architecture(
    "sd15",
    {
        "sample_size": 64,
        "block_out_channels": (320, 640, 1280, 1280),
        "down_block_types": (*("CrossAttnDownBlock2D",) * 3, "DownBlock2D"),
        "up_block_types": ("UpBlock2D", *("CrossAttnUpBlock2D",) * 3),
        "layers_per_block": 2,
        "cross_attention_dim": 768,
        "attention_head_dim": 8,  # in fact the number of heads
    },
    default_steps=20,
)
SDXL = Architecture(
    "sdxl",
    {
        "sample_size": 128,
        "block_out_channels": (320, 640, 1280),
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
        "layers_per_block": 2,
        "transformer_layers_per_block": (1, 2, 10),
        "cross_attention_dim": 2048,
        "attention_head_dim": (5, 10, 20),
        "use_linear_projection": True,
        "addition_embed_type": "text_time",
        "addition_time_embed_dim": 256,
        "projection_class_embeddings_input_dim": _POOLED_WIDTH + _NUM_TIME_IDS * 256,
    },
    default_steps=30,
)


def bundled_architecture() -> Architecture:
    """The UNet of the bundled model, for devices that are too slow for the others."""
    config = json.loads((pathlib.Path(noria.__file__).parent / "models/bundled/unet/config.json").read_text("utf-8"))
    settings = {name: value for name, value in config.items() if not name.startswith("_")}
    return Architecture("bundled", settings, default_steps=20, num_tokens=24)


@dataclass(frozen=True)
class Inputs:
    """The inputs of one UNet step."""

    latents_RCHW: torch.Tensor
    timesteps_R: torch.Tensor
    text_RTD: torch.Tensor
    added: dict[str, torch.Tensor] | None  # of SDXL

    def predict(self, unet: Any) -> torch.Tensor:
        """The UNet's output [R, C, H, W]."""
        output: torch.Tensor = unet(
            self.latents_RCHW,
            self.timesteps_R,
            encoder_hidden_states=self.text_RTD,
            added_cond_kwargs=self.added,
            return_dict=False,
        )[0]
        return output


def build_unet(architecture: Architecture, device: str | torch.device, dtype: torch.dtype) -> Any:
    """The UNet with random weights, created on `device` in `dtype` without a second copy."""
    from diffusers import UNet2DConditionModel

    previous_dtype = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            torch.manual_seed(0)
            unet = UNet2DConditionModel(**architecture.config)
    finally:
        torch.set_default_dtype(previous_dtype)
    return unet.eval().requires_grad_(requires_grad=False)


def make_inputs(
    architecture: Architecture, side_px: int, rows: int, device: str | torch.device, dtype: torch.dtype
) -> Inputs:
    """Random inputs, reproducible from the arguments. Timesteps are one float tensor [R], as in the engine."""
    side, width = side_px // architecture.latent_scale, architecture.config["cross_attention_dim"]
    # Not in a `with torch.device`, which leaves `linspace` on the CPU after transformers has loaded a model:
    # transformers replaces `torch.linspace` meanwhile, and torch caches which functions take a device.
    torch.manual_seed(1)
    latents = torch.randn(rows, 4, side, side, dtype=dtype, device=device)
    text = torch.randn(rows, architecture.num_tokens, width, dtype=dtype, device=device)
    timesteps = torch.linspace(999.0, 1.0, rows, device=device)
    added = None
    if architecture.has_pooled_text:
        sizes = torch.tensor([side_px, side_px, 0, 0, side_px, side_px], dtype=dtype, device=device).repeat(rows, 1)
        added = {"text_embeds": torch.randn(rows, _POOLED_WIDTH, dtype=dtype, device=device), "time_ids": sizes}
    return Inputs(latents, timesteps, text, added)


@functools.cache
def flops_of_row(architecture: Architecture, side_px: int) -> int:
    """Floating-point operations of one row in matrix products, convolutions and attention (a multiply-add counts as
    two).

    Counted on meta tensors, which takes a second and no memory.
    """
    from torch.utils.flop_counter import FlopCounterMode

    unet = build_unet(architecture, "meta", torch.float32)
    inputs = make_inputs(architecture, side_px, 1, "meta", torch.float32)
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        inputs.predict(unet)
    return int(counter.get_total_flops())
