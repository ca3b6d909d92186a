"""Checks and describes a folder of Lumina 2: tokenizer, text_encoder (Gemma 2), transformer, vae, scheduler."""

import pathlib
from typing import Annotated

from msgspec import Meta

from noria.errors import ModelError
from noria.models.diffusion.folders.pipeline_folder import Count, PartConfig, Sides, VaeConfig
from noria.models.diffusion.folders.transformer_models.transformer_folder import (
    PATCH,
    SCHEDULERS_WITH_SIGMAS,
    Axes,
    Gemma2Config,
    TransformerFolder,
)
from noria.models.family import Family
from noria.protocol.diffusion import DiffusionModelSpec

MAX_PROMPT_TOKENS = 256
"""Longer prompts are cut, as by diffusers; the words before them are counted."""

_FACTOR = 8  # pixels per latent, whatever the VAE, in diffusers' pipeline
_MAX_SIDE_PX = 2048


class _Transformer(PartConfig, frozen=True):
    """The settings of the transformer that decide its sizes; defaults are diffusers'."""

    sample_size: Annotated[int, Meta(ge=8, le=512)] = 128
    patch_size: Count = PATCH
    in_channels: Count = 16
    out_channels: Count | None = None
    hidden_size: Count = 2304
    num_attention_heads: Count = 24
    cap_feat_dim: Count = 1024
    axes_dim_rope: Axes = (32, 32, 32)
    axes_lens: Axes = (300, 512, 512)


def inspect(path: pathlib.Path, family: Family) -> DiffusionModelSpec:
    """Check all parts of a folder and return its spec, as `Family.inspect` does."""
    folder = TransformerFolder.open(path, family)
    folder.read_euler_scheduler()
    text_encoder = folder.read_language_model(Gemma2Config)
    transformer = _read_transformer(folder, text_encoder)
    names = ("time_caption_embed.caption_embedder.1.weight", "cap_embedder.1.weight")
    caption = {"hidden_size": (0, transformer.hidden_size), "cap_feat_dim": (1, transformer.cap_feat_dim)}
    folder.check_layer("transformer", names, caption)
    multiple_px = PATCH * _FACTOR
    max_side_px = min(_MAX_SIDE_PX, multiple_px * min(transformer.axes_lens[1:]))
    side_px = min(transformer.sample_size * _FACTOR, max_side_px) // multiple_px * multiple_px
    return folder.make_spec(
        Sides(side_px, side_px, min(4 * multiple_px, side_px), max_side_px, multiple_px),
        SCHEDULERS_WITH_SIGMAS,
        steps=30,
        guidance=4.0,
    )


def _read_transformer(folder: TransformerFolder, text_encoder: Gemma2Config) -> _Transformer:
    """Read the configurations of transformer and VAE, and check that the parts fit together."""
    transformer = folder.read_part("transformer", _Transformer)
    vae = folder.read_part("vae", VaeConfig)
    heads = transformer.hidden_size // transformer.num_attention_heads
    folder.check_fit(
        ("patch_size", transformer.patch_size, PATCH, "that of the pipeline"),
        ("in_channels", transformer.in_channels, vae.latent_channels, "the VAE's latent_channels"),
        ("out_channels", transformer.out_channels or transformer.in_channels, vae.latent_channels, "in_channels"),
        ("cap_feat_dim", transformer.cap_feat_dim, text_encoder.hidden_size, "hidden_size of text_encoder"),
        ("the sum of axes_dim_rope", sum(transformer.axes_dim_rope), heads, "hidden_size by num_attention_heads"),
    )
    folder.check_fit(("its downscaling", vae.factor, _FACTOR, "that of the pipeline"), part="vae")
    if transformer.axes_lens[0] <= MAX_PROMPT_TOKENS:  # the positions of a prompt begin at 0; its image has the next
        raise ModelError(
            f"{folder.config_file('transformer')}: axes_lens is {transformer.axes_lens}; the first must be above "
            f"{MAX_PROMPT_TOKENS}, for prompts of as many tokens."
        )
    folder.check_vae(vae)
    return transformer
