"""Checks and describes a folder of Stable Diffusion 3 or 3.5: two CLIPs, T5, transformer, vae, scheduler.

This module knows neither torch nor what the parts compute; `stable_diffusion_3.py` loads them.
"""

import pathlib

import msgspec
from msgspec import Struct

from noria.models.diffusion.folders.pipeline_folder import (
    Count,
    Overrides,
    Sides,
    VaeConfig,
    check_files,
    check_layer,
    make_spec,
    read_overrides,
    read_part,
    read_shapes,
)
from noria.models.diffusion.folders.transformer_models.transformer_folder import check_fit, read_flow_scheduler, read_t5
from noria.models.diffusion.folders.unet_models.unet_folder import read_text_encoder
from noria.models.families import Family
from noria.models.weights import num_tensor_parameters
from noria.protocol.diffusion import DiffusionModelSpec

# Not: flow-euler-a and flow-lcm, whose noise diffusers' pipeline draws without the seed.
_SCHEDULERS = ("flow-euler", "flow-heun", "flow-unipc", "flow-dpm++2m")
_DYNAMIC_SCHEDULERS = ("flow-euler", "flow-unipc", "flow-dpm++2m")  # with a shift by the image's size


class _Transformer(Struct, frozen=True):
    """The settings of the transformer that decide its sizes; defaults are diffusers'."""

    class_name: str = msgspec.field(name="_class_name")
    sample_size: Count = 128
    patch_size: Count = 2
    in_channels: Count = 16
    out_channels: Count = 16
    joint_attention_dim: Count = 4096
    pooled_projection_dim: Count = 2048
    pos_embed_max_size: Count = 96


def inspect(folder: pathlib.Path, family: Family) -> DiffusionModelSpec:
    """Check all parts of a folder and return its spec, without name and fingerprint.

    Raises:
        ModelError: a file is damaged, or a part is not supported.

    """
    pipeline = check_files(folder, family)
    scheduler, overrides = read_flow_scheduler(folder), read_overrides(folder, Overrides)
    transformer, vae = _read_sizes(folder, family)
    shapes = read_shapes(folder, family)
    expected = {"in_channels": (1, transformer.in_channels)}
    names = ("pos_embed.proj.weight", "x_embedder.proj.weight")
    check_layer(folder, family, "transformer", shapes["transformer"], names, expected)
    schedulers = _DYNAMIC_SCHEDULERS if scheduler.get("use_dynamic_shifting") else _SCHEDULERS
    multiple_px = transformer.patch_size * vae.factor
    max_side_px = min(2 * transformer.sample_size * vae.factor, transformer.pos_embed_max_size * multiple_px)
    side_px = min(transformer.sample_size * vae.factor, max_side_px) // multiple_px * multiple_px
    return make_spec(
        folder,
        family,
        pipeline,
        overrides,
        Sides(side_px, side_px, min(2 * multiple_px, side_px), max_side_px // multiple_px * multiple_px, multiple_px),
        schedulers,
        steps=28,
        guidance=7.0,
        num_parameters=num_tensor_parameters(shapes["transformer"]),
    )


def _read_sizes(folder: pathlib.Path, family: Family) -> tuple[_Transformer, VaeConfig]:
    """Read the configurations, and check that the parts fit together."""
    file = folder / "transformer" / "config.json"
    transformer = read_part(folder, family, "transformer", _Transformer)
    vae = read_part(folder, family, "vae", VaeConfig)
    t5 = read_t5(folder, family, "_3")
    clips = [read_text_encoder(folder, family, suffix) for suffix in ("", "_2")]
    pooled = sum(clip.projection_dim for clip in clips)
    check_fit(
        file,
        ("in_channels", transformer.in_channels, vae.latent_channels, "the VAE's latent_channels"),
        ("out_channels", transformer.out_channels, vae.latent_channels, "the VAE's latent_channels"),
        ("joint_attention_dim", transformer.joint_attention_dim, t5.d_model, "d_model of text_encoder_3"),
        ("pooled_projection_dim", transformer.pooled_projection_dim, pooled, "the projection_dim of both CLIPs"),
    )
    return transformer, vae
