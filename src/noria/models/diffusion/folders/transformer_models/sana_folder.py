"""Checks and describes a folder of Sana: tokenizer, text_encoder (Gemma 2), transformer, AutoencoderDC, scheduler."""

import math
import pathlib
from typing import Annotated, Literal

from msgspec import Meta

from noria.errors import ModelError
from noria.images import scheduler_names
from noria.models.diffusion.folders.pipeline_folder import Count, VaeConfig, sides_around
from noria.models.diffusion.folders.transformer_models.transformer_folder import (
    HEADS,
    CaptionedTransformer,
    Gemma2Config,
    TransformerFolder,
)
from noria.models.family import Family
from noria.protocol.diffusion import DiffusionModelSpec

_MULTIPLE_PX = 32  # divides widths and heights, whatever the VAE, in diffusers' pipeline


class _Transformer(CaptionedTransformer, frozen=True):
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
    folder = TransformerFolder.open(path, family)
    if folder.read_flow_scheduler().get("use_dynamic_shifting"):
        raise ModelError(
            f"{folder.scheduler_file}: use_dynamic_shifting is true; the pipeline of Sana "
            "gives no shift for an image's size. Set it to false."
        )
    text_encoder = folder.read_language_model(Gemma2Config)
    transformer = folder.read_part("transformer", _Transformer)
    vae = folder.read_part("vae", VaeConfig)
    folder.check_captioned(transformer, vae, text_encoder.hidden_size, "hidden_size of text_encoder")
    caption = {HEADS: (0, transformer.width), "caption_channels": (1, transformer.caption_channels)}
    folder.check_layer("transformer", ("caption_projection.linear_1.weight",), caption)
    return folder.make_spec(
        sides_around(transformer.sample_size * vae.factor, math.lcm(_MULTIPLE_PX, transformer.patch_size * vae.factor)),
        # All: the pipeline draws their noise with the seed.
        tuple(choice.name for choice in scheduler_names.choices_of_family("flow")),
        steps=20,
        guidance=4.5,
        takes_start_images=False,  # diffusers has no pipeline for them
    )
