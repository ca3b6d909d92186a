"""Checks and describes a folder of FLUX.2: tokenizer, text_encoder, transformer, vae, scheduler.

The text encoder of klein is a Qwen3, that of dev a Mistral 3.
"""

import pathlib

from msgspec import Struct

from noria.errors import ModelError
from noria.models.diffusion.folders.pipeline_folder import Count, VaeConfig
from noria.models.diffusion.folders.transformer_models.flux_folder import packed_sides
from noria.models.diffusion.folders.transformer_models.transformer_folder import (
    PACKING,
    PATCH,
    LanguageModelConfig,
    PackedTransformer,
    Qwen3Config,
    TransformerFolder,
    packed_schedulers,
)
from noria.models.family import Family
from noria.models.files.weights import REDOWNLOAD_HINT, read_struct
from noria.protocol.diffusion import DiffusionModelSpec

_MAX_REFERENCES = 4  # that of the authors of klein; diffusers' pipelines have no limit

KLEIN_TEXT_LAYERS, DEV_TEXT_LAYERS = (9, 18, 27), (10, 20, 30)
"""Layers of the text encoder whose inputs, side by side, condition the transformer."""


class _Transformer(PackedTransformer, frozen=True):
    in_channels: Count = 128
    num_attention_heads: Count = 48
    joint_attention_dim: Count = 15360
    axes_dims_rope: tuple[Count, Count, Count, Count] = (32, 32, 32, 32)
    guidance_embeds: bool = True


class _Vae(VaeConfig, frozen=True):
    latent_channels: Count = 32
    patch_size: tuple[Count, Count] = (PATCH, PATCH)


class _Index(Struct, frozen=True):
    is_distilled: bool = False


def is_distilled(folder: pathlib.Path) -> bool:
    """Return whether the model has learned its guidance, and so takes none."""
    return read_struct(folder / "model_index.json", _Index).is_distilled


def inspect_klein(path: pathlib.Path, family: Family) -> DiffusionModelSpec:
    """Check all parts of a folder of klein and return its spec, as `Family.inspect` does."""
    folder = TransformerFolder.open(path, family)
    _check_parts(folder, folder.read_language_model(Qwen3Config), KLEIN_TEXT_LAYERS)
    steps, guidance = (4, 1.0) if is_distilled(path) else (50, 4.0)
    return _make_spec(folder, steps=steps, guidance=guidance)


def inspect_dev(path: pathlib.Path, family: Family) -> DiffusionModelSpec:
    """Check all parts of a folder of dev and return its spec, as `Family.inspect` does."""
    folder = TransformerFolder.open(path, family)
    text_encoder = folder.read_vision_language_model("mistral3", LanguageModelConfig)
    transformer = _check_parts(folder, text_encoder, DEV_TEXT_LAYERS)
    if not transformer.guidance_embeds:
        raise ModelError(
            f"{folder.config_file('transformer')}: guidance_embeds is false; supported is true, since the pipeline of "
            f"dev has no other guidance. {REDOWNLOAD_HINT}"
        )
    return _make_spec(folder, steps=50, guidance=4.0)


def _check_parts(
    folder: TransformerFolder, text_encoder: LanguageModelConfig, text_layers: tuple[int, ...]
) -> _Transformer:
    """Check that the transformer fits the text encoder and the VAE, and return its settings."""
    transformer, vae = folder.read_part("transformer", _Transformer), folder.read_part("vae", _Vae)
    if text_encoder.num_hidden_layers < text_layers[-1]:
        raise ModelError(
            f"{folder.config_file('text_encoder')}: num_hidden_layers is {text_encoder.num_hidden_layers}; at least "
            f"{text_layers[-1]} are needed, since layers {', '.join(map(str, text_layers))} condition the transformer."
        )
    folder.check_fit(*(("patch_size", side, PATCH, PACKING) for side in vae.patch_size), part="vae")
    text_width = len(text_layers) * text_encoder.hidden_size
    folder.check_packed(transformer, vae, text_width, "three times hidden_size of text_encoder")
    folder.check_layer("vae", ("bn.running_mean",), {"in_channels of the transformer": (0, transformer.in_channels)})
    return transformer


def _make_spec(folder: TransformerFolder, *, steps: int, guidance: float) -> DiffusionModelSpec:
    return folder.make_spec(
        packed_sides(folder.read_part("vae", _Vae)),
        packed_schedulers(folder.read_flow_scheduler()),
        steps=steps,
        guidance=guidance,
        max_references=_MAX_REFERENCES,
    )
