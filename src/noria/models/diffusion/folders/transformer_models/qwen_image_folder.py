"""Checks and describes a folder of Qwen-Image: tokenizer, text_encoder (Qwen2.5-VL), transformer, vae, scheduler.

A folder of Qwen-Image-Edit-Plus has the same parts, and a processor, whose settings are those of the text encoder.
"""

import pathlib
from typing import Any

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
from noria.protocol.diffusion import DiffusionModelSpec

_EDITS_IMAGES = "QwenImageEditPlusPipeline"
_MAX_REFERENCES = 3  # its authors': one to three images

_OTHER_MODELS = {
    "guidance_embeds": "a model that embeds the guidance scale, which diffusers does not call correctly",
    "zero_cond_t": "Qwen-Image-Edit-Plus, whose folder names that pipeline",
    "use_additional_t_cond": "Qwen-Image-Layered",
    "use_layer3d_rope": "Qwen-Image-Layered",
}


class _Transformer(PartConfig, frozen=True):
    """The settings of the transformer that decide whether it is supported, and its sizes; defaults are diffusers'."""

    patch_size: Count = PATCH
    in_channels: Count = 64
    out_channels: Count | None = 16
    attention_head_dim: Count = 128
    num_attention_heads: Count = 24
    joint_attention_dim: Count = 3584
    axes_dims_rope: Axes = (16, 56, 56)
    guidance_embeds: bool = False
    zero_cond_t: bool = False
    use_additional_t_cond: bool = False
    use_layer3d_rope: bool = False


def inspect(path: pathlib.Path, family: Family) -> DiffusionModelSpec:
    """Check all parts of a folder and return its spec, as `Family.inspect` does."""
    folder = TransformerFolder.open(path, family)
    folder.read_euler_scheduler()
    text_encoder = folder.read_vision_language_model("qwen2_5_vl", QwenTextConfig)
    vae = read_qwen_vae(folder, QwenVaeConfig)
    transformer = folder.read_part("transformer", _Transformer)
    edits = folder.pipeline == _EDITS_IMAGES
    for setting, model in _OTHER_MODELS.items():
        if getattr(transformer, setting) and not (edits and setting == "zero_cond_t"):
            raise ModelError(
                f"{folder.config_file('transformer')}: {setting} is true: {model}; supported is Qwen-Image, text to "
                "image."
            )
    channels, heads = vae.z_dim * PATCH**2, transformer.attention_head_dim
    folder.check_fit(
        ("patch_size", transformer.patch_size, PATCH, "that of the pipeline"),
        ("in_channels", transformer.in_channels, channels, "the VAE's z_dim in blocks of 2 × 2"),
        ("out_channels", transformer.out_channels or transformer.in_channels, vae.z_dim, "the VAE's z_dim"),
        ("joint_attention_dim", transformer.joint_attention_dim, text_encoder.hidden_size, "that of text_encoder"),
        ("the sum of axes_dims_rope", sum(transformer.axes_dims_rope), heads, "attention_head_dim"),
    )
    expected = {
        HEADS: (0, transformer.num_attention_heads * heads),
        "joint_attention_dim": (1, transformer.joint_attention_dim),
    }
    folder.check_layer("transformer", ("txt_in.weight",), expected)
    references: dict[str, Any] = {"max_references": _MAX_REFERENCES, "reference_size": "vision"} if edits else {}
    return folder.make_spec(qwen_sides(vae), SCHEDULERS_WITH_SIGMAS, steps=50, guidance=4.0, **references)
