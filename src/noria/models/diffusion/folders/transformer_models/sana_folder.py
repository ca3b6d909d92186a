"""Checks and describes a folder of Sana: tokenizer, text_encoder (Gemma 2), transformer, AutoencoderDC, scheduler.

This module knows neither torch nor what the parts compute; `sana.py` loads them.
"""

import math
import pathlib
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from noria.errors import ModelError
from noria.images import scheduler_names
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
    sides_around,
)
from noria.models.diffusion.folders.transformer_models.transformer_folder import (
    Gemma2Config,
    check_fit,
    read_flow_scheduler,
)
from noria.models.families import Family
from noria.models.weights import num_tensor_parameters, read_struct
from noria.protocol.diffusion import DiffusionModelSpec

_MULTIPLE_PX = 32  # of widths and heights, whatever the VAE, in diffusers' pipeline


class _Transformer(Struct, frozen=True):
    """The settings of the transformer that decide its sizes; defaults are diffusers'."""

    class_name: str = msgspec.field(name="_class_name")
    sample_size: Annotated[int, Meta(ge=4, le=128)] = 32  # 128: of 4096 px
    patch_size: Count = 1
    in_channels: Count = 32
    out_channels: Count | None = 32
    num_attention_heads: Count = 70
    attention_head_dim: Count = 32
    cross_attention_dim: Count = 2240
    caption_channels: Count = 2304
    guidance_embeds: Literal[False] = False  # Sana Sprint's, which has a pipeline of its own


def inspect(folder: pathlib.Path, family: Family) -> DiffusionModelSpec:
    """Check all parts of a folder and return its spec, without name and fingerprint.

    Raises:
        ModelError: a file is damaged, or a part is not supported.

    """
    pipeline = check_files(folder, family)
    if read_flow_scheduler(folder).get("use_dynamic_shifting"):
        raise ModelError(
            f"{folder / 'scheduler' / 'scheduler_config.json'}: use_dynamic_shifting is true; the pipeline of Sana "
            "gives no shift for an image's size. Set it to false."
        )
    overrides = read_overrides(folder, Overrides)
    text_encoder = read_struct(folder / "text_encoder" / "config.json", Gemma2Config)
    check_vocabulary(folder / "tokenizer", text_encoder.vocab_size)
    file = folder / "transformer" / "config.json"
    transformer = read_part(folder, family, "transformer", _Transformer)
    vae = read_part(folder, family, "vae", VaeConfig)
    width = transformer.num_attention_heads * transformer.attention_head_dim
    out_channels = transformer.out_channels or transformer.in_channels
    check_fit(
        file,
        ("in_channels", transformer.in_channels, vae.latent_channels, "the VAE's latent_channels"),
        ("caption_channels", transformer.caption_channels, text_encoder.hidden_size, "hidden_size of text_encoder"),
        ("cross_attention_dim", transformer.cross_attention_dim, width, "num_attention_heads × attention_head_dim"),
    )
    if out_channels != 2 * transformer.in_channels:  # of those the second half, a variance, is not used
        check_fit(file, ("out_channels", out_channels, vae.latent_channels, "in_channels or twice as many"))
    shapes = read_shapes(folder, family)
    embedding = {"vocab_size": (0, text_encoder.vocab_size), "hidden_size": (1, text_encoder.hidden_size)}
    heads = "num_attention_heads × attention_head_dim"
    caption = {heads: (0, width), "caption_channels": (1, transformer.caption_channels)}
    for part, names, expected in (
        ("text_encoder", ("embed_tokens.weight", "model.embed_tokens.weight"), embedding),
        ("transformer", ("caption_projection.linear_1.weight",), caption),
        ("vae", ("decoder.conv_in.weight",), {"latent_channels": (1, vae.latent_channels)}),
    ):
        check_layer(folder, family, part, shapes[part], names, expected)
    return make_spec(
        folder,
        family,
        pipeline,
        overrides,
        sides_around(transformer.sample_size * vae.factor, math.lcm(_MULTIPLE_PX, transformer.patch_size * vae.factor)),
        # All: the pipeline draws their noise with the seed.
        tuple(choice.name for choice in scheduler_names.choices_of_family("flow")),
        steps=20,
        guidance=4.5,
        num_parameters=num_tensor_parameters(shapes["transformer"]),
        takes_start_images=False,  # diffusers has no pipeline for them
    )
