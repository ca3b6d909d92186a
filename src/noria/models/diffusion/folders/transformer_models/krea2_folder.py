"""Checks and describes a folder of Krea 2: tokenizer, text_encoder (Qwen3-VL), transformer, vae, scheduler."""

import pathlib
from typing import Annotated, Literal

from msgspec import Meta, Struct

from noria.errors import ModelError
from noria.models.diffusion.folders.pipeline_folder import Count, PartConfig
from noria.models.diffusion.folders.transformer_models.qwen_folder import (
    QwenTextConfig,
    QwenVaeConfig,
    qwen_sides,
    read_qwen_vae,
)
from noria.models.diffusion.folders.transformer_models.transformer_folder import (
    HEADS,
    PATCH,
    SCHEDULERS_WITH_SIGMAS,
    Axes,
    TransformerFolder,
)
from noria.models.family import Family
from noria.models.files.weights import read_struct
from noria.protocol.diffusion import DiffusionModelSpec


class Krea2Index(Struct, frozen=True):
    """The settings that the pipeline keeps in model_index.json; defaults are diffusers'."""

    # The outputs of the text encoder that the transformer takes; 0 is that of its embedding.
    text_encoder_select_layers: (
        Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(min_length=1, max_length=256)] | None
    ) = None
    is_distilled: bool = False
    patch_size: Literal[2] = 2

    @property
    def text_layers(self) -> tuple[int, ...]:
        """The outputs that the transformer takes."""
        return self.text_encoder_select_layers or tuple(range(2, 36, 3))


class _Transformer(PartConfig, frozen=True):
    """The settings of the transformer that decide its sizes; defaults are diffusers'."""

    in_channels: Count = 64
    attention_head_dim: Count = 128
    num_attention_heads: Count = 48
    text_hidden_dim: Count = 2560
    num_text_layers: Count = 12
    axes_dims_rope: Axes = (32, 48, 48)


def inspect(path: pathlib.Path, family: Family) -> DiffusionModelSpec:
    """Check all parts of a folder and return its spec, as `Family.inspect` does."""
    folder = TransformerFolder.open(path, family)
    index_file = path / "model_index.json"
    index = read_struct(index_file, Krea2Index)
    folder.read_euler_scheduler()
    text_encoder = folder.read_vision_language_model("qwen3_vl", QwenTextConfig)
    vae = read_qwen_vae(folder, QwenVaeConfig)
    if max(index.text_layers) > text_encoder.num_hidden_layers:
        raise ModelError(
            f"{index_file}: text_encoder_select_layers has {max(index.text_layers)}; allowed are 0 to "
            f"{text_encoder.num_hidden_layers}, the text encoder's num_hidden_layers."
        )
    transformer = folder.read_part("transformer", _Transformer)
    channels, heads = vae.z_dim * PATCH**2, transformer.attention_head_dim
    folder.check_fit(
        ("in_channels", transformer.in_channels, channels, "the VAE's z_dim in blocks of 2 × 2"),
        ("text_hidden_dim", transformer.text_hidden_dim, text_encoder.hidden_size, "hidden_size of text_encoder"),
        ("num_text_layers", transformer.num_text_layers, len(index.text_layers), "as many as the pipeline selects"),
        ("the sum of axes_dims_rope", sum(transformer.axes_dims_rope), heads, "attention_head_dim"),
    )
    expected = {
        HEADS: (0, transformer.num_attention_heads * heads),
        "text_hidden_dim": (1, transformer.text_hidden_dim),
    }
    names = ("txt_in.linear_1.weight", "txtmlp.1.weight")
    folder.check_layer("transformer", names, expected)
    steps, guidance = (8, 0.0) if index.is_distilled else (28, 4.5)
    return folder.make_spec(qwen_sides(vae), SCHEDULERS_WITH_SIGMAS, steps=steps, guidance=guidance)
