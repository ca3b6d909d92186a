"""Checks and describes a folder of Sana: tokenizer, text_encoder (Gemma 2), transformer, AutoencoderDC, scheduler."""

import math
import pathlib
from typing import Annotated, Literal

from msgspec import Meta

from noria.errors import ModelError
from noria.images import scheduler_names
from noria.models.diffusion.folders.pipeline_folder import Count, PartConfig, PipelineFolder, VaeConfig, sides_around
from noria.models.diffusion.folders.transformer_models.transformer_folder import (
    Gemma2Config,
    check_fit,
    check_language_model,
    read_flow_scheduler,
    read_language_model,
)
from noria.models.family import Family
from noria.protocol.diffusion import DiffusionModelSpec

_MULTIPLE_PX = 32  # of widths and heights, whatever the VAE, in diffusers' pipeline


class _Transformer(PartConfig, frozen=True):
    """The settings of the transformer that decide its sizes; defaults are diffusers'."""

    sample_size: Annotated[int, Meta(ge=4, le=128)] = 32  # 128: of 4096 px
    patch_size: Count = 1
    in_channels: Count = 32
    out_channels: Count | None = 32
    num_attention_heads: Count = 70
    attention_head_dim: Count = 32
    cross_attention_dim: Count = 2240
    caption_channels: Count = 2304
    guidance_embeds: Literal[False] = False  # Sana Sprint's, which has a pipeline of its own


def inspect(path: pathlib.Path, family: Family) -> DiffusionModelSpec:
    """Check all parts of a folder and return its spec, as `Family.inspect` does."""
    folder = PipelineFolder.open(path, family)
    if read_flow_scheduler(folder).get("use_dynamic_shifting"):
        raise ModelError(
            f"{folder.scheduler_file}: use_dynamic_shifting is true; the pipeline of Sana "
            "gives no shift for an image's size. Set it to false."
        )
    text_encoder = read_language_model(folder, Gemma2Config)
    transformer = folder.read_part("transformer", _Transformer)
    vae = folder.read_part("vae", VaeConfig)
    width = transformer.num_attention_heads * transformer.attention_head_dim
    out_channels = transformer.out_channels or transformer.in_channels
    check_fit(
        folder,
        ("in_channels", transformer.in_channels, vae.latent_channels, "the VAE's latent_channels"),
        ("caption_channels", transformer.caption_channels, text_encoder.hidden_size, "hidden_size of text_encoder"),
        ("cross_attention_dim", transformer.cross_attention_dim, width, "num_attention_heads × attention_head_dim"),
    )
    if out_channels != 2 * transformer.in_channels:  # of those the second half, a variance, is not used
        check_fit(folder, ("out_channels", out_channels, vae.latent_channels, "in_channels or twice as many"))
    check_language_model(folder, text_encoder)
    heads = "num_attention_heads × attention_head_dim"
    caption = {heads: (0, width), "caption_channels": (1, transformer.caption_channels)}
    folder.check_layer("transformer", ("caption_projection.linear_1.weight",), caption)
    folder.check_layer("vae", ("decoder.conv_in.weight",), {"latent_channels": (1, vae.latent_channels)})
    return folder.make_spec(
        sides_around(transformer.sample_size * vae.factor, math.lcm(_MULTIPLE_PX, transformer.patch_size * vae.factor)),
        # All: the pipeline draws their noise with the seed.
        tuple(choice.name for choice in scheduler_names.choices_of_family("flow")),
        steps=20,
        guidance=4.5,
        takes_start_images=False,  # diffusers has no pipeline for them
    )
