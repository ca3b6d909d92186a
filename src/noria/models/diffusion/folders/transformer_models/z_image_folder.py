"""Checks and describes a folder of Z-Image: tokenizer, text_encoder (Qwen3), transformer, vae, scheduler."""

import pathlib
from typing import Annotated

from msgspec import Meta

from noria.errors import ModelError
from noria.models.diffusion.folders.pipeline_folder import Count, Overrides, PartConfig, Sides, VaeConfig
from noria.models.diffusion.folders.transformer_models.transformer_folder import (
    MAX_PROMPT_TOKENS,
    PATCH,
    Axes,
    Qwen3Config,
    TransformerFolder,
)
from noria.models.family import Family
from noria.protocol.diffusion import DiffusionModelSpec

_SCHEDULERS = ("flow-euler",)
"""With the others, diffusers' pipeline fails, because it gives them noise levels, or draws noise without the seed."""

_SIDE_PX = 1024  # that the published models were trained at, and the default of diffusers
_MAX_SIDE_PX = 2048
_TURBO_SHIFT = 3.0  # shift of the scheduler of the distilled model; that of the other is 6


class _Transformer(PartConfig, frozen=True):
    """The settings of the transformer that decide whether it is supported, and its sizes; defaults are diffusers'."""

    all_patch_size: tuple[int, ...] = (PATCH,)
    all_f_patch_size: tuple[int, ...] = (1,)
    in_channels: Count = 16
    dim: Count = 3840
    n_heads: Count = 30
    cap_feat_dim: Count = 2560
    siglip_feat_dim: int | None = None
    axes_dims: Axes = (32, 48, 48)
    axes_lens: Axes = (1024, 512, 512)


class ZImageOverrides(Overrides, frozen=True, forbid_unknown_fields=True):
    """The settings of noria.json."""

    cfg_normalization: Annotated[float, Meta(ge=0, le=10)] = 0.0  # requests share it, as in diffusers' pipeline; 0: off


def inspect(path: pathlib.Path, family: Family) -> DiffusionModelSpec:
    """Check all parts of a folder and return its spec, as `Family.inspect` does."""
    folder = TransformerFolder.open(path, family)
    scheduler = folder.read_euler_scheduler()
    text_encoder = folder.read_language_model(Qwen3Config)
    transformer = folder.read_part("transformer", _Transformer)
    vae = folder.read_part("vae", VaeConfig)
    _check_fit(folder, transformer, text_encoder, vae)
    caption = {"dim": (0, transformer.dim), "cap_feat_dim": (1, transformer.cap_feat_dim)}
    folder.check_layer("transformer", ("cap_embedder.1.weight",), caption)
    folder.check_vae(vae)
    overrides, is_turbo = folder.read_overrides(ZImageOverrides), scheduler.shift == _TURBO_SHIFT
    steps, guidance = (9, 0.0) if is_turbo else (50, 5.0)
    multiple_px = PATCH * vae.factor
    max_side_px = min(_MAX_SIDE_PX, multiple_px * min(transformer.axes_lens[1:])) // multiple_px * multiple_px
    side_px = min(_SIDE_PX, max_side_px)
    return folder.make_spec(
        Sides(side_px, side_px, min(4 * multiple_px, side_px), max_side_px, multiple_px),
        _SCHEDULERS,
        steps=steps,
        guidance=guidance,
        overrides=overrides,
        cfg_normalization=overrides.cfg_normalization,
    )


def _check_fit(folder: TransformerFolder, transformer: _Transformer, text_encoder: Qwen3Config, vae: VaeConfig) -> None:
    """Check that the transformer is one for text to image, and fits text encoder and VAE."""
    file = folder.config_file("transformer")
    if transformer.siglip_feat_dim is not None:
        raise ModelError(
            f"{file}: siglip_feat_dim is {transformer.siglip_feat_dim}: Z-Image-Omni, which takes images too; "
            "supported is text to image."
        )
    if (transformer.all_patch_size, transformer.all_f_patch_size) != ((PATCH,), (1,)):
        raise ModelError(
            f"{file}: all_patch_size {transformer.all_patch_size} and all_f_patch_size {transformer.all_f_patch_size}; "
            f"supported are {(PATCH,)} and {(1,)}."
        )
    inner = transformer.n_heads * sum(transformer.axes_dims)
    folder.check_fit(
        ("in_channels", transformer.in_channels, vae.latent_channels, "latent_channels of the VAE"),
        ("cap_feat_dim", transformer.cap_feat_dim, text_encoder.hidden_size, "hidden_size of text_encoder"),
        ("dim", transformer.dim, inner, "n_heads times the sum of axes_dims"),
    )
    longest = MAX_PROMPT_TOKENS + 2  # positions of a prompt begin at 1, and its image has the next
    if transformer.axes_lens[0] < longest:
        raise ModelError(
            f"{file}: axes_lens is {transformer.axes_lens}; the first must be at least {longest}, for prompts of "
            f"{MAX_PROMPT_TOKENS} tokens."
        )
