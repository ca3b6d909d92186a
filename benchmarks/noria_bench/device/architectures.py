"""The measured denoisers, of published architectures, with random weights, which take as long as trained ones.

SD1.5: Rombach et al., 2022, "High-Resolution Image Synthesis with Latent Diffusion Models" (860 M parameters, CLIP
ViT-L text of 768).

SDXL: Podell et al., 2023, table 1 (2.6 B parameters, two text encoders of 2,048 together, sizes and pooled text
embedded with the time).

FLUX.1 dev (11.9 B parameters, 512 tokens of T5 beside those of the image) and Z-Image (6.2 B): the defaults of
diffusers' FluxTransformer2DModel and ZImageTransformer2DModel.

Shapes: R rows (inputs of the denoiser; an image with classifier-free guidance has two), C × H × W latents, T tokens, D
text width.
"""

import functools
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import noria

_CLIP_TOKENS = 77
# SDXL's pooled text, and its original size, crop and target size.
_POOLED_WIDTH, _NUM_TIME_IDS = 1280, 6
# FLUX.1's tokens of T5, their width, and the width of CLIP's pooled text.
_T5_TOKENS, _T5_WIDTH, _CLIP_WIDTH = 512, 4096, 768
# A prompt of a few sentences, for Qwen3.
_CHAT_TOKENS, _QWEN3_WIDTH = 128, 2560
_FLOW_CHANNELS, _PATCH = 16, 2


@dataclass(frozen=True)
class Architecture:
    """A denoiser and its usual settings."""

    name: str
    config: dict[str, Any] = field(hash=False)  # arguments of the diffusers class
    default_steps: int
    denoiser: str = "UNet2DConditionModel"  # name of a class of diffusers
    rows_of_image: int = 2
    latent_scale: int = 8  # pixels of a side per latent
    num_tokens: int = _CLIP_TOKENS

    @property
    def is_unet(self) -> bool:
        """Whether it has convolutions, so that the order of memory matters, and a UNet's inputs."""
        return self.denoiser == "UNet2DConditionModel"


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
FLUX = Architecture(
    "flux",
    {"guidance_embeds": True},
    default_steps=28,
    denoiser="FluxTransformer2DModel",
    rows_of_image=1,  # its guidance is embedded
    num_tokens=_T5_TOKENS,
)
Z_IMAGE = Architecture(
    "z-image",
    {},
    default_steps=8,  # default of Turbo, which takes no guidance
    denoiser="ZImageTransformer2DModel",
    rows_of_image=1,
    num_tokens=_CHAT_TOKENS,
)


def bundled_architecture() -> Architecture:
    """The UNet of the bundled model, for devices that are too slow for the others."""
    config = json.loads((pathlib.Path(noria.__file__).parent / "models/bundled/unet/config.json").read_text("utf-8"))
    settings = {name: value for name, value in config.items() if not name.startswith("_")}
    return Architecture("bundled", settings, default_steps=20, num_tokens=24)


@dataclass(frozen=True)
class Inputs:
    """The inputs of one step of a denoiser."""

    latents: Any  # as the denoiser takes them: a tensor, or a list of one for each row
    others: Mapping[str, Any]

    def predict(self, denoiser: Any) -> torch.Tensor:
        """The denoiser's output [R, …]."""
        output = denoiser(self.latents, **self.others, return_dict=False)[0]
        return torch.stack(output) if isinstance(output, list) else output

    def in_channels_last(self) -> "Inputs":
        """The same with latents [R, C, H, W] in NHWC order."""
        return replace(self, latents=self.latents.contiguous(memory_format=torch.channels_last))


def build_denoiser(architecture: Architecture, device: str | torch.device, dtype: torch.dtype) -> Any:
    """The denoiser with random weights, created on `device` in `dtype` without a second copy."""
    import diffusers

    previous_dtype = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            torch.manual_seed(0)
            denoiser = getattr(diffusers, architecture.denoiser)(**architecture.config)
    finally:
        torch.set_default_dtype(previous_dtype)
    return denoiser.eval().requires_grad_(requires_grad=False)


def make_inputs(
    architecture: Architecture, side_px: int, rows: int, device: str | torch.device, dtype: torch.dtype
) -> Inputs:
    """Random inputs, reproducible from the arguments. Timesteps are one float tensor [R], as in the engine."""
    # Not in a `with torch.device`, which leaves `linspace` on the CPU after transformers has loaded a model:
    # transformers replaces `torch.linspace` meanwhile, and torch caches which functions take a device.
    torch.manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=dtype, device=device)

    make = {"FluxTransformer2DModel": _flux_inputs, "ZImageTransformer2DModel": _z_image_inputs}
    side, timesteps_R = side_px // architecture.latent_scale, torch.linspace(999.0, 1.0, rows, device=device)
    return make.get(architecture.denoiser, _unet_inputs)(architecture, side, timesteps_R, random)


_Random = Callable[..., torch.Tensor]  # makes a random tensor of the shape given as arguments


def _unet_inputs(architecture: Architecture, side: int, timesteps_R: torch.Tensor, random: _Random) -> Inputs:
    rows = len(timesteps_R)
    latents_RCHW = random(rows, 4, side, side)
    text_RTD = random(rows, architecture.num_tokens, architecture.config["cross_attention_dim"])
    others = {"timestep": timesteps_R, "encoder_hidden_states": text_RTD}
    if architecture.config.get("addition_embed_type") == "text_time":
        side_px = side * architecture.latent_scale
        sizes = torch.tensor([side_px, side_px, 0, 0, side_px, side_px]).to(latents_RCHW).repeat(rows, 1)
        added = {"text_embeds": random(rows, _POOLED_WIDTH), "time_ids": sizes}
        return Inputs(latents_RCHW, others | {"added_cond_kwargs": added})
    return Inputs(latents_RCHW, others)


def _flux_inputs(architecture: Architecture, side: int, timesteps_R: torch.Tensor, random: _Random) -> Inputs:
    rows, tokens = len(timesteps_R), side // _PATCH
    across, down = torch.meshgrid(torch.arange(tokens), torch.arange(tokens), indexing="xy")
    latents_RNC = random(rows, tokens**2, _FLOW_CHANNELS * _PATCH**2)
    others = {
        "timestep": (timesteps_R / 1000).to(latents_RNC.dtype),
        "guidance": torch.full_like(timesteps_R, 3.5),
        "encoder_hidden_states": random(rows, architecture.num_tokens, _T5_WIDTH),
        "pooled_projections": random(rows, _CLIP_WIDTH),
        "txt_ids": torch.zeros(architecture.num_tokens, 3).to(latents_RNC),
        "img_ids": torch.stack([torch.zeros_like(down), down, across], -1).reshape(-1, 3).to(latents_RNC),
    }
    return Inputs(latents_RNC, others)


def _z_image_inputs(architecture: Architecture, side: int, timesteps_R: torch.Tensor, random: _Random) -> Inputs:
    rows = len(timesteps_R)
    captions = [random(architecture.num_tokens, _QWEN3_WIDTH) for _ in range(rows)]
    latents = [random(_FLOW_CHANNELS, 1, side, side) for _ in range(rows)]
    return Inputs(latents, {"t": timesteps_R / 1000, "cap_feats": captions})


def joined(inputs: Sequence[Inputs]) -> Inputs:
    """Join several inputs into one call, for denoisers that take lists of rows of any size."""
    names = inputs[0].others.keys()
    values = {name: [each.others[name] for each in inputs] for name in names}
    return Inputs(
        [row for each in inputs for row in each.latents],
        {"t": torch.cat(values["t"]), "cap_feats": [row for rows in values["cap_feats"] for row in rows]},
    )


@functools.cache
def flops_of_row(architecture: Architecture, side_px: int) -> int:
    """Floating-point operations of one row in matrix products, convolutions and attention (a multiply-add counts as
    two).

    Counted on meta tensors, which takes seconds and no memory.
    """
    from torch.utils.flop_counter import FlopCounterMode

    denoiser = build_denoiser(architecture, "meta", torch.float32)
    inputs = make_inputs(architecture, side_px, 1, "meta", torch.float32)
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        inputs.predict(denoiser)
    return int(counter.get_total_flops())
