"""Checks and describes a folder of FLUX.2 klein: tokenizer, text_encoder (Qwen3), transformer, vae, scheduler."""

import pathlib

from msgspec import Struct

from noria.errors import ModelError
from noria.models.diffusion.folders.pipeline_folder import Count, VaeConfig
from noria.models.diffusion.folders.transformer_models.flux_folder import packed_sides
from noria.models.diffusion.folders.transformer_models.transformer_folder import (
    PACKING,
    PATCH,
    PackedTransformer,
    Qwen3Config,
    TransformerFolder,
    packed_schedulers,
)
from noria.models.family import Family
from noria.models.weights import read_struct
from noria.protocol.diffusion import DiffusionModelSpec

_MAX_REFERENCES = 4  # its authors'; diffusers' pipeline has no limit

TEXT_LAYERS = (9, 18, 27)
"""Of Qwen3, whose inputs, side by side, condition the transformer."""


class _Transformer(PackedTransformer, frozen=True):
    in_channels: Count = 128
    num_attention_heads: Count = 48
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
    folder = TransformerFolder.open(path, family)
    scheduler, text_encoder = folder.read_flow_scheduler(), folder.read_language_model(Qwen3Config)
    transformer = folder.read_part("transformer", _Transformer)
    vae = folder.read_part("vae", _Vae)
    if text_encoder.num_hidden_layers < TEXT_LAYERS[-1]:
        raise ModelError(
            f"{folder.config_file('text_encoder')}: num_hidden_layers is {text_encoder.num_hidden_layers}; at least "
            f"{TEXT_LAYERS[-1]} are needed, since layers {', '.join(map(str, TEXT_LAYERS))} condition the transformer."
        )
    folder.check_fit(*(("patch_size", side, PATCH, PACKING) for side in vae.patch_size), part="vae")
    text_width = len(TEXT_LAYERS) * text_encoder.hidden_size
    folder.check_packed(transformer, vae, text_width, "three times hidden_size of text_encoder")
    folder.check_layer("vae", ("bn.running_mean",), {"in_channels of the transformer": (0, transformer.in_channels)})
    steps, guidance = (4, 1.0) if is_distilled(path) else (50, 4.0)
    return folder.make_spec(
        packed_sides(vae), packed_schedulers(scheduler), steps=steps, guidance=guidance, max_references=_MAX_REFERENCES
    )
