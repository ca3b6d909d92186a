"""Checks and describes a folder of Lumina 2: tokenizer, text_encoder (Gemma 2), transformer, vae, scheduler.

This module knows neither torch nor what the parts compute; `lumina2.py` loads them.
"""

import pathlib
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from noria.errors import ModelError
from noria.models.diffusion.folders.pipeline_folder import (
    Count,
    Overrides,
    Sides,
    VaeConfig,
    check_files,
    check_layer,
    check_vocabulary,
    make_spec,
    read_overrides,
    read_part,
    read_shapes,
)
from noria.models.diffusion.folders.transformer_models.transformer_folder import (
    PATCH,
    SCHEDULERS_WITH_SIGMAS,
    Gemma2Config,
    check_fit,
    read_euler_scheduler,
)
from noria.models.families import Family
from noria.models.weights import num_tensor_parameters, read_struct
from noria.protocol.diffusion import DiffusionModelSpec

MAX_PROMPT_TOKENS = 256
"""Longer prompts are cut, as by diffusers; the words before them are counted."""

_FACTOR = 8  # pixels per latent, whatever the VAE, in diffusers' pipeline
_MAX_SIDE_PX = 2048
_Axes = Annotated[tuple[Count, ...], Meta(min_length=3, max_length=3)]  # of prompt, rows and columns of tokens


class _Transformer(Struct, frozen=True):
    """The settings of the transformer that decide its sizes; defaults are diffusers'."""

    class_name: str = msgspec.field(name="_class_name")
    sample_size: Annotated[int, Meta(ge=8, le=512)] = 128
    patch_size: Count = PATCH
    in_channels: Count = 16
    out_channels: Count | None = None
    hidden_size: Count = 2304
    num_attention_heads: Count = 24
    cap_feat_dim: Count = 1024
    axes_dim_rope: _Axes = (32, 32, 32)
    axes_lens: _Axes = (300, 512, 512)


def inspect(folder: pathlib.Path, family: Family) -> DiffusionModelSpec:
    """Check all parts of a folder and return its spec, without name and fingerprint.

    Raises:
        ModelError: a file is damaged, or a part is not supported.

    """
    pipeline = check_files(folder, family)
    read_euler_scheduler(folder)
    overrides = read_overrides(folder, Overrides)
    text_encoder = read_struct(folder / "text_encoder" / "config.json", Gemma2Config)
    check_vocabulary(folder / "tokenizer", text_encoder.vocab_size)
    transformer = _read_transformer(folder, family, text_encoder)
    shapes = read_shapes(folder, family)
    embedding = {"vocab_size": (0, text_encoder.vocab_size), "hidden_size": (1, text_encoder.hidden_size)}
    caption = {"hidden_size": (0, transformer.hidden_size), "cap_feat_dim": (1, transformer.cap_feat_dim)}
    for part, names, expected in (
        ("text_encoder", ("embed_tokens.weight", "model.embed_tokens.weight"), embedding),
        ("transformer", ("time_caption_embed.caption_embedder.1.weight", "cap_embedder.1.weight"), caption),
        ("vae", ("decoder.conv_in.weight",), {"latent_channels": (1, transformer.in_channels)}),
    ):
        check_layer(folder, family, part, shapes[part], names, expected)
    multiple_px = PATCH * _FACTOR
    max_side_px = min(_MAX_SIDE_PX, multiple_px * min(transformer.axes_lens[1:]))
    side_px = min(transformer.sample_size * _FACTOR, max_side_px) // multiple_px * multiple_px
    return make_spec(
        folder,
        family,
        pipeline,
        overrides,
        Sides(side_px, side_px, min(4 * multiple_px, side_px), max_side_px, multiple_px),
        SCHEDULERS_WITH_SIGMAS,
        steps=30,
        guidance=4.0,
        num_parameters=num_tensor_parameters(shapes["transformer"]),
    )


def _read_transformer(folder: pathlib.Path, family: Family, text_encoder: Gemma2Config) -> _Transformer:
    """Read the configurations of transformer and VAE, and check that the parts fit together."""
    file = folder / "transformer" / "config.json"
    transformer = read_part(folder, family, "transformer", _Transformer)
    vae = read_part(folder, family, "vae", VaeConfig)
    heads = transformer.hidden_size // transformer.num_attention_heads
    check_fit(
        file,
        ("patch_size", transformer.patch_size, PATCH, "that of the pipeline"),
        ("in_channels", transformer.in_channels, vae.latent_channels, "the VAE's latent_channels"),
        ("out_channels", transformer.out_channels or transformer.in_channels, vae.latent_channels, "in_channels"),
        ("cap_feat_dim", transformer.cap_feat_dim, text_encoder.hidden_size, "hidden_size of text_encoder"),
        ("the sum of axes_dim_rope", sum(transformer.axes_dim_rope), heads, "hidden_size by num_attention_heads"),
    )
    check_fit(folder / "vae" / "config.json", ("its downscaling", vae.factor, _FACTOR, "that of the pipeline"))
    if transformer.axes_lens[0] <= MAX_PROMPT_TOKENS:  # the positions of a prompt begin at 0; its image has the next
        raise ModelError(
            f"{file}: axes_lens is {transformer.axes_lens}; the first must be above {MAX_PROMPT_TOKENS}, for prompts "
            f"of as many tokens."
        )
    return transformer
