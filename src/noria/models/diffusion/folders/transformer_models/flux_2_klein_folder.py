"""Checks and describes a folder of FLUX.2 klein: tokenizer, text_encoder (Qwen3), transformer, vae, scheduler.

This module knows neither torch nor what the parts compute; `flux_2_klein.py` loads them.
"""

import pathlib

import msgspec
from msgspec import Struct

from noria.errors import ModelError
from noria.models.diffusion.folders.pipeline_folder import (
    Count,
    Overrides,
    VaeConfig,
    check_files,
    check_layer,
    check_vocabulary,
    make_spec,
    read_overrides,
    read_part,
    read_shapes,
)
from noria.models.diffusion.folders.transformer_models.flux_folder import packed_sides
from noria.models.diffusion.folders.transformer_models.transformer_folder import (
    PATCH,
    Qwen3Config,
    check_fit,
    packed_schedulers,
    read_flow_scheduler,
)
from noria.models.families import Family
from noria.models.weights import num_tensor_parameters, read_struct
from noria.protocol.diffusion import DiffusionModelSpec

_MAX_REFERENCES = 4  # its authors'; diffusers' pipeline has no limit

TEXT_LAYERS = (9, 18, 27)
"""Of Qwen3, whose inputs, side by side, condition the transformer."""


class _Transformer(Struct, frozen=True):
    """The settings of the transformer that decide its sizes; defaults are diffusers'."""

    class_name: str = msgspec.field(name="_class_name")
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


def inspect(folder: pathlib.Path, family: Family) -> DiffusionModelSpec:
    """Check all parts of a folder and return its spec, without name and fingerprint.

    Raises:
        ModelError: a file is damaged, or a part is not supported.

    """
    pipeline = check_files(folder, family)
    scheduler, overrides = read_flow_scheduler(folder), read_overrides(folder, Overrides)
    text_file, file, vae_file = (folder / part / "config.json" for part in ("text_encoder", "transformer", "vae"))
    text_encoder = read_struct(text_file, Qwen3Config)
    transformer = read_part(folder, family, "transformer", _Transformer)
    vae = read_part(folder, family, "vae", _Vae)
    check_vocabulary(folder / "tokenizer", text_encoder.vocab_size)
    if text_encoder.num_hidden_layers < TEXT_LAYERS[-1]:
        raise ModelError(
            f"{text_file}: num_hidden_layers is {text_encoder.num_hidden_layers}; at least {TEXT_LAYERS[-1]} are "
            f"needed, since layers {', '.join(map(str, TEXT_LAYERS))} condition the transformer."
        )
    channels = vae.latent_channels * PATCH**2
    check_fit(vae_file, *(("patch_size", side, PATCH, "the pipeline packs latents itself") for side in vae.patch_size))
    check_fit(
        file,
        ("patch_size", transformer.patch_size, 1, "the pipeline packs latents itself"),
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
    steps, guidance = (4, 1.0) if is_distilled(folder) else (50, 4.0)
    return make_spec(
        folder,
        family,
        pipeline,
        overrides,
        packed_sides(vae),
        packed_schedulers(scheduler),
        steps=steps,
        guidance=guidance,
        max_references=_MAX_REFERENCES,
        num_parameters=_check_weights(folder, family, transformer, text_encoder, vae),
    )


def _check_weights(
    folder: pathlib.Path, family: Family, transformer: _Transformer, text_encoder: Qwen3Config, vae: _Vae
) -> int:
    """Check the first layers of each part; return the transformer's parameters."""
    shapes = read_shapes(folder, family)
    inner = transformer.num_attention_heads * transformer.attention_head_dim
    embedder = {"num_attention_heads × attention_head_dim": (0, inner), "in_channels": (1, transformer.in_channels)}
    joint = {"joint_attention_dim": (1, transformer.joint_attention_dim)}
    for part, names, expected in (
        (
            "text_encoder",
            ("embed_tokens.weight", "model.embed_tokens.weight"),
            {"vocab_size": (0, text_encoder.vocab_size), "hidden_size": (1, text_encoder.hidden_size)},
        ),
        ("transformer", ("x_embedder.weight", "img_in.weight"), embedder),
        ("transformer", ("context_embedder.weight", "txt_in.weight"), joint),
        ("vae", ("decoder.conv_in.weight",), {"latent_channels": (1, vae.latent_channels)}),
        ("vae", ("bn.running_mean",), {"in_channels of the transformer": (0, transformer.in_channels)}),
    ):
        check_layer(folder, family, part, shapes[part], names, expected)
    return num_tensor_parameters(shapes["transformer"])
