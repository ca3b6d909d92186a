"""Checks and describes a folder of Chroma: T5 with its tokenizer, transformer, vae, scheduler.

This module knows neither torch nor what the parts compute; `chroma.py` loads them.
"""

import pathlib

import msgspec
from msgspec import Struct

from noria.models.diffusion.folders.pipeline_folder import (
    Count,
    Overrides,
    VaeConfig,
    check_files,
    check_layer,
    make_spec,
    read_overrides,
    read_part,
    read_shapes,
)
from noria.models.diffusion.folders.transformer_models.flux_folder import packed_sides
from noria.models.diffusion.folders.transformer_models.transformer_folder import (
    PATCH,
    check_fit,
    read_flow_scheduler,
    read_t5,
)
from noria.models.families import Family
from noria.models.weights import num_tensor_parameters
from noria.protocol.diffusion import DiffusionModelSpec

# diffusers' pipeline gives all others noise levels: UniPC other ones than it does for FLUX.1, and the rest take none.
_SCHEDULERS = ("flow-euler",)


class _Transformer(Struct, frozen=True):
    """The settings of the transformer that decide its sizes; defaults are diffusers'."""

    class_name: str = msgspec.field(name="_class_name")
    in_channels: Count = 64
    out_channels: Count | None = None
    patch_size: Count = 1
    num_attention_heads: Count = 24
    attention_head_dim: Count = 128
    joint_attention_dim: Count = 4096
    axes_dims_rope: tuple[Count, Count, Count] = (16, 56, 56)
    approximator_num_channels: Count = 64


def inspect(folder: pathlib.Path, family: Family) -> DiffusionModelSpec:
    """Check all parts of a folder and return its spec, without name and fingerprint.

    Raises:
        ModelError: a file is damaged, or a part is not supported.

    """
    pipeline = check_files(folder, family)
    read_flow_scheduler(folder)
    overrides, t5 = read_overrides(folder, Overrides), read_t5(folder, family, "")
    file = folder / "transformer" / "config.json"
    transformer = read_part(folder, family, "transformer", _Transformer)
    vae = read_part(folder, family, "vae", VaeConfig)
    channels = vae.latent_channels * PATCH**2
    check_fit(
        file,
        ("patch_size", transformer.patch_size, 1, "the pipeline packs latents itself"),
        ("in_channels", transformer.in_channels, channels, "the VAE's latent channels in blocks of 2 × 2"),
        ("out_channels", transformer.out_channels or transformer.in_channels, channels, "those of the input"),
        ("joint_attention_dim", transformer.joint_attention_dim, t5.d_model, "d_model of text_encoder"),
        ("attention_head_dim", transformer.attention_head_dim, sum(transformer.axes_dims_rope), "of axes_dims_rope"),
    )
    return make_spec(
        folder,
        family,
        pipeline,
        overrides,
        packed_sides(vae),
        _SCHEDULERS,
        steps=35,
        guidance=5.0,
        num_parameters=_check_weights(folder, family, transformer, vae, t5.vocab_size),
    )


def _check_weights(
    folder: pathlib.Path, family: Family, transformer: _Transformer, vae: VaeConfig, vocab_size: int
) -> int:
    """Check the first layers of each part; return the transformer's parameters."""
    shapes = read_shapes(folder, family)
    embeddings = ("shared.weight", "encoder.embed_tokens.weight")
    inner = transformer.num_attention_heads * transformer.attention_head_dim
    embedder = {"num_attention_heads × attention_head_dim": (0, inner), "in_channels": (1, transformer.in_channels)}
    text = {"joint_attention_dim": (1, transformer.joint_attention_dim)}
    channels = {"approximator_num_channels": (1, transformer.approximator_num_channels)}
    for part, names, expected in (
        ("text_encoder", embeddings, {"vocab_size": (0, vocab_size)}),
        ("transformer", ("x_embedder.weight", "img_in.weight"), embedder),
        ("transformer", ("context_embedder.weight", "txt_in.weight"), text),
        ("transformer", ("distilled_guidance_layer.in_proj.weight",), channels),
        ("vae", ("decoder.conv_in.weight",), {"latent_channels": (1, vae.latent_channels)}),
    ):
        check_layer(folder, family, part, shapes[part], names, expected)
    return num_tensor_parameters(shapes["transformer"])
