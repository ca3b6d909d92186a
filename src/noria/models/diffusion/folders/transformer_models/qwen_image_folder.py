"""Checks and describes a folder of Qwen-Image: tokenizer, text_encoder (Qwen2.5-VL), transformer, vae, scheduler.

This module knows neither torch nor what the parts compute; `qwen_image.py` loads them.
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
    check_files,
    check_layer,
    make_spec,
    read_overrides,
    read_part,
    read_shapes,
)
from noria.models.diffusion.folders.transformer_models.qwen_folder import (
    check_qwen_layers,
    read_qwen_text_encoder,
    read_qwen_vae,
)
from noria.models.diffusion.folders.transformer_models.transformer_folder import (
    PATCH,
    SCHEDULERS_WITH_SIGMAS,
    check_fit,
    read_euler_scheduler,
)
from noria.models.families import Family
from noria.models.weights import num_tensor_parameters
from noria.protocol.diffusion import DiffusionModelSpec

_DEFAULT_LATENTS = 128  # of a side, diffusers' default; trained at about 1.3 to 1.7 million pixels
_OTHER_MODELS = {
    "guidance_embeds": "a model that embeds the guidance scale, which diffusers does not call correctly",
    "zero_cond_t": "Qwen-Image-Edit, which takes images too",
    "use_additional_t_cond": "Qwen-Image-Layered",
    "use_layer3d_rope": "Qwen-Image-Layered",
}


class _Transformer(Struct, frozen=True):
    """The settings of the transformer that decide whether it is supported, and its sizes; defaults are diffusers'."""

    class_name: str = msgspec.field(name="_class_name")
    patch_size: Count = PATCH
    in_channels: Count = 64
    out_channels: Count | None = 16
    attention_head_dim: Count = 128
    num_attention_heads: Count = 24
    joint_attention_dim: Count = 3584
    axes_dims_rope: Annotated[tuple[Count, ...], Meta(min_length=3, max_length=3)] = (16, 56, 56)
    guidance_embeds: bool = False
    zero_cond_t: bool = False
    use_additional_t_cond: bool = False
    use_layer3d_rope: bool = False


def inspect(folder: pathlib.Path, family: Family) -> DiffusionModelSpec:
    """Check all parts of a folder and return its spec, without name and fingerprint.

    Raises:
        ModelError: a file is damaged, or a part is not supported.

    """
    pipeline = check_files(folder, family)
    read_euler_scheduler(folder)
    overrides = read_overrides(folder, Overrides)
    text_encoder, vae = read_qwen_text_encoder(folder, ("qwen2_5_vl",)), read_qwen_vae(folder, family)
    file = folder / "transformer" / "config.json"
    transformer = read_part(folder, family, "transformer", _Transformer)
    for setting, model in _OTHER_MODELS.items():
        if getattr(transformer, setting):
            raise ModelError(f"{file}: {setting} is true: {model}; supported is Qwen-Image, text to image.")
    channels, heads = vae.z_dim * PATCH**2, transformer.attention_head_dim
    check_fit(
        file,
        ("patch_size", transformer.patch_size, PATCH, "that of the pipeline"),
        ("in_channels", transformer.in_channels, channels, "the VAE's z_dim in blocks of 2 × 2"),
        ("out_channels", transformer.out_channels or transformer.in_channels, vae.z_dim, "the VAE's z_dim"),
        ("joint_attention_dim", transformer.joint_attention_dim, text_encoder.hidden_size, "that of text_encoder"),
        ("the sum of axes_dims_rope", sum(transformer.axes_dims_rope), heads, "attention_head_dim"),
    )
    shapes = read_shapes(folder, family)
    check_qwen_layers(folder, family, shapes, text_encoder, vae)
    expected = {
        "num_attention_heads × attention_head_dim": (0, transformer.num_attention_heads * heads),
        "joint_attention_dim": (1, transformer.joint_attention_dim),
    }
    check_layer(folder, family, "transformer", shapes["transformer"], ("txt_in.weight",), expected)
    side_px, multiple_px = _DEFAULT_LATENTS * vae.factor, PATCH * vae.factor
    return make_spec(
        folder,
        family,
        pipeline,
        overrides,
        Sides(side_px, side_px, 4 * multiple_px, 2 * side_px, multiple_px),
        SCHEDULERS_WITH_SIGMAS,
        steps=50,
        guidance=4.0,
        num_parameters=num_tensor_parameters(shapes["transformer"]),
    )
