"""Checks and describes a folder of FLUX.2 klein: tokenizer, text_encoder (Qwen3), transformer, vae, scheduler."""

import pathlib

from msgspec import Struct

from noria.errors import ModelError
from noria.models.diffusion.folders.pipeline_folder import Count, PartConfig, PipelineFolder, VaeConfig
from noria.models.diffusion.folders.transformer_models.flux_folder import packed_sides
from noria.models.diffusion.folders.transformer_models.transformer_folder import (
    PATCH,
    Qwen3Config,
    check_fit,
    check_language_model,
    packed_schedulers,
    read_flow_scheduler,
    read_language_model,
)
from noria.models.family import Family
from noria.models.weights import read_struct
from noria.protocol.diffusion import DiffusionModelSpec

_MAX_REFERENCES = 4  # its authors'; diffusers' pipeline has no limit

TEXT_LAYERS = (9, 18, 27)
"""Of Qwen3, whose inputs, side by side, condition the transformer."""


class _Transformer(PartConfig, frozen=True):
    """The settings of the transformer that decide its sizes; defaults are diffusers'."""

    in_channels: Count = 128
    out_channels: Count | None = None
    patch_size: Count = 1
    num_attention_heads: Count = 48
    attention_head_dim: Count = 128
    joint_attention_dim: Count = 15360
    axes_dims_rope: tuple[Count, Count, Count, Count] = (32, 32, 32, 32)


class _Vae(VaeConfig, frozen=True):
    latent_channels: Count = 32
    patch_size: tuple[Count, Count] = (PATCH, PATCH)


class _Index(Struct, frozen=True):
    is_distilled: bool = False


def is_distilled(folder: pathlib.Path) -> bool:
    """Return whether the model has learned its guidance, and so takes none."""
    return read_struct(folder / "model_index.json", _Index).is_distilled


def inspect(path: pathlib.Path, family: Family) -> DiffusionModelSpec:
    """Check all parts of a folder and return its spec, as `Family.inspect` does."""
    folder = PipelineFolder.open(path, family)
    scheduler, text_encoder = read_flow_scheduler(folder), read_language_model(folder, Qwen3Config)
    transformer = folder.read_part("transformer", _Transformer)
    vae = folder.read_part("vae", _Vae)
    if text_encoder.num_hidden_layers < TEXT_LAYERS[-1]:
        raise ModelError(
            f"{folder.config_file('text_encoder')}: num_hidden_layers is {text_encoder.num_hidden_layers}; at least "
            f"{TEXT_LAYERS[-1]} are needed, since layers {', '.join(map(str, TEXT_LAYERS))} condition the transformer."
        )
    channels = vae.latent_channels * PATCH**2
    packing = "the pipeline packs latents itself"
    check_fit(folder, *(("patch_size", side, PATCH, packing) for side in vae.patch_size), part="vae")
    check_fit(
        folder,
        ("patch_size", transformer.patch_size, 1, packing),
        ("in_channels", transformer.in_channels, channels, "the VAE's latent channels in blocks of 2 × 2"),
        ("out_channels", transformer.out_channels or transformer.in_channels, channels, "those of the input"),
        (
            "joint_attention_dim",
            transformer.joint_attention_dim,
            len(TEXT_LAYERS) * text_encoder.hidden_size,
            "three times hidden_size of text_encoder",
        ),
        ("attention_head_dim", transformer.attention_head_dim, sum(transformer.axes_dims_rope), "of axes_dims_rope"),
    )
    inner = transformer.num_attention_heads * transformer.attention_head_dim
    check_language_model(folder, text_encoder)
    folder.check_layer(
        "transformer",
        ("x_embedder.weight", "img_in.weight"),
        {"num_attention_heads × attention_head_dim": (0, inner), "in_channels": (1, transformer.in_channels)},
    )
    folder.check_layer(
        "transformer",
        ("context_embedder.weight", "txt_in.weight"),
        {"joint_attention_dim": (1, transformer.joint_attention_dim)},
    )
    folder.check_layer("vae", ("decoder.conv_in.weight",), {"latent_channels": (1, vae.latent_channels)})
    folder.check_layer("vae", ("bn.running_mean",), {"in_channels of the transformer": (0, transformer.in_channels)})
    steps, guidance = (4, 1.0) if is_distilled(path) else (50, 4.0)
    return folder.make_spec(
        packed_sides(vae), packed_schedulers(scheduler), steps=steps, guidance=guidance, max_references=_MAX_REFERENCES
    )
