"""Checks and describes a folder of Qwen-Image 2.1: processor, text_encoder (Qwen3-VL), transformer, vae, scheduler."""

import pathlib
from typing import Annotated, Literal

from msgspec import Meta, Struct

from noria.models.diffusion.folders.pipeline_folder import Count, PartConfig, Sides
from noria.models.diffusion.folders.transformer_models.qwen_folder import (
    Levels,
    Numbers,
    QwenTextConfig,
    QwenVaeConfig,
    read_qwen_vae,
)
from noria.models.diffusion.folders.transformer_models.transformer_folder import (
    HEADS,
    SCHEDULERS_WITH_SIGMAS,
    Axes,
    TransformerFolder,
)
from noria.models.family import Family
from noria.models.files.weights import read_struct
from noria.protocol.diffusion import DiffusionModelSpec

_NUM_STEPS = 40  # the pipeline's
_SIDE_PX, _MULTIPLE_PX = 1024, 32  # the pipeline's, too
_LATENT_PX = 16
_NUM_CHANNELS = 64  # diffusers' default
_MAX_REFERENCES = 3  # as of Qwen-Image-Edit-Plus; the pipeline has no limit

_Sigma = Annotated[float, Meta(gt=0, le=1)]


class Qwen21Index(Struct, frozen=True):
    """The settings that the pipeline keeps in model_index.json."""

    sample_sigmas: Annotated[tuple[_Sigma, ...], Meta(min_length=1, max_length=1000)] | None = None


class _Transformer(PartConfig, frozen=True):
    """The settings of the transformer that decide whether it is supported, and its sizes; defaults are diffusers'."""

    patch_size: Count = 1
    in_channels: Count = _NUM_CHANNELS
    out_channels: Count | None = _NUM_CHANNELS
    attention_head_dim: Count = 128
    num_attention_heads: Count = 32
    context_in_dim: Count = 4096
    axes_dims_rope: Axes = (16, 56, 56)
    causal_condition: Literal[True] = True  # else tokens of prompts are modulated by the time


class _Vae(QwenVaeConfig, frozen=True):
    z_dim: Count = _NUM_CHANNELS
    dim_mult: Levels = (1, 2, 4, 8, 8)
    temperal_downsample: Annotated[tuple[bool, ...], Meta(max_length=8)] = (False, True, True, True)
    latents_mean: Numbers = (0.0,) * _NUM_CHANNELS
    latents_std: Numbers = (1.0,) * _NUM_CHANNELS
    decoder_base_dim: Count | None = 144
    in_channels: Literal[4] = 4
    out_channels: Literal[4] = 4
    patch_size: None = None

    @property
    def decoder_width(self) -> int:
        """Channels of the decoder's first layer."""
        return (self.decoder_base_dim or self.base_dim) * self.dim_mult[-1]


def inspect(path: pathlib.Path, family: Family) -> DiffusionModelSpec:
    """Check all parts of a folder and return its spec, as `Family.inspect` does."""
    folder = TransformerFolder.open(path, family)
    index = read_struct(path / "model_index.json", Qwen21Index)
    folder.read_euler_scheduler()
    text_encoder = folder.read_vision_language_model("qwen3_vl", QwenTextConfig, tokenizer="processor")
    vae, transformer = read_qwen_vae(folder, _Vae), folder.read_part("transformer", _Transformer)
    heads = transformer.attention_head_dim
    folder.check_fit(("pixels per latent", vae.factor, _LATENT_PX, "that of the pipeline"), part="vae")
    folder.check_fit(
        ("patch_size", transformer.patch_size, 1, "that of the pipeline"),
        ("in_channels", transformer.in_channels, vae.z_dim, "the VAE's z_dim"),
        ("out_channels", transformer.out_channels or transformer.in_channels, vae.z_dim, "the VAE's z_dim"),
        ("context_in_dim", transformer.context_in_dim, text_encoder.hidden_size, "hidden_size of text_encoder"),
        ("the sum of axes_dims_rope", sum(transformer.axes_dims_rope), heads, "attention_head_dim"),
    )
    expected = {HEADS: (0, transformer.num_attention_heads * heads), "context_in_dim": (1, transformer.context_in_dim)}
    folder.check_layer("transformer", ("txt_in.in_layer.weight",), expected)
    return folder.make_spec(
        Sides(_SIDE_PX, _SIDE_PX, 2 * _MULTIPLE_PX, 2 * _SIDE_PX, _MULTIPLE_PX),
        SCHEDULERS_WITH_SIGMAS,
        steps=len(index.sample_sigmas or ()) or _NUM_STEPS,
        guidance=1.0,
        max_references=_MAX_REFERENCES,
        reference_size="joint",
    )
