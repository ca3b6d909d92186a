"""Makes the configuration of a transformer of the shapes of its tensors, which have diffusers' names.

Shapes do not tell how positions are encoded: a folder's own configuration says that, or diffusers' defaults do.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

from noria.errors import ModelError
from noria.models.diffusion.single_file.part_names import Origins
from noria.models.files.weights import Shapes

_PATCH = 2  # latents of a token along one side
_HEAD_WIDTH = 64  # channels of a head in all published models of Stable Diffusion 3, where no norm says it


class _Sizes:
    """Shapes of tensors in diffusers' names."""

    def __init__(self, shapes: Shapes) -> None:
        self.shapes = shapes

    def length(self, name: str, axis: int) -> int:
        """Return the length of an axis of a tensor. Raises ModelError: it has no such axis, or one without numbers."""
        shape = self.shapes.get(name, ())
        if axis >= len(shape) or not all(shape):
            raise ModelError(f"{name}, in diffusers' names, has the shape {list(shape)}: the file is damaged.")
        return shape[axis]

    def count(self, template: str) -> int:
        """Return how many of the tensors 0, 1, 2 … there are."""
        return next(number for number in itertools.count() if template.format(number) not in self.shapes)

    def heads(self, width: int, norm: str, name: str) -> dict[str, int]:
        """Return the number and the width of the heads of attention, which are normalised one by one."""
        head_width = self.length(norm, 0)
        return {name: width // head_width, "attention_head_dim": head_width}


def _packed(sizes: _Sizes) -> dict[str, Any]:
    """Return the settings of FLUX.1 and Chroma."""
    in_channels, out_channels = sizes.length("x_embedder.weight", 1), sizes.length("proj_out.weight", 0)
    width, norm = sizes.length("x_embedder.weight", 0), "transformer_blocks.0.attn.norm_q.weight"
    return {
        "in_channels": in_channels,
        "out_channels": None if out_channels == in_channels else out_channels,
        "num_layers": sizes.count("transformer_blocks.{}.attn.to_q.weight"),
        "num_single_layers": sizes.count("single_transformer_blocks.{}.attn.to_q.weight"),
        "joint_attention_dim": sizes.length("context_embedder.weight", 1),
        **sizes.heads(width, norm, "num_attention_heads"),
    }


def _flux(sizes: _Sizes) -> dict[str, Any]:
    return _packed(sizes) | {
        "pooled_projection_dim": sizes.length("time_text_embed.text_embedder.linear_1.weight", 1),
        "guidance_embeds": "time_text_embed.guidance_embedder.linear_1.weight" in sizes.shapes,
    }


def _chroma(sizes: _Sizes) -> dict[str, Any]:
    layer = "distilled_guidance_layer.in_proj.weight"
    return _packed(sizes) | {
        "approximator_num_channels": sizes.length(layer, 1),
        "approximator_hidden_dim": sizes.length(layer, 0),
        "approximator_layers": sizes.count("distilled_guidance_layer.layers.{}.linear_1.weight"),
    }


def _stable_diffusion_3(sizes: _Sizes) -> dict[str, Any]:
    patches, block = "pos_embed.proj.weight", "transformer_blocks.{}."
    width, patch = sizes.length(patches, 0), sizes.length(patches, 2)
    num_layers = sizes.count(f"{block}attn.to_q.weight")
    has_norms = f"{block.format(0)}attn.norm_q.weight" in sizes.shapes
    head_width = sizes.length(f"{block.format(0)}attn.norm_q.weight", 0) if has_norms else _HEAD_WIDTH
    return {
        "in_channels": sizes.length(patches, 1),
        "out_channels": sizes.length("proj_out.weight", 0) // patch**2,
        "patch_size": patch,
        "num_layers": num_layers,
        "attention_head_dim": head_width,
        "num_attention_heads": width // head_width,
        "joint_attention_dim": sizes.length("context_embedder.weight", 1),
        "caption_projection_dim": sizes.length("context_embedder.weight", 0),
        "pooled_projection_dim": sizes.length("time_text_embed.text_embedder.linear_1.weight", 1),
        "pos_embed_max_size": math.isqrt(sizes.length("pos_embed.pos_embed", 1)),
        "dual_attention_layers": [
            number for number in range(num_layers) if f"{block.format(number)}attn2.to_q.weight" in sizes.shapes
        ],
        "qk_norm": "rms_norm" if has_norms else None,
    }


def _z_image(sizes: _Sizes) -> dict[str, Any]:
    patches, layer = "all_x_embedder.2-1.weight", "layers.0.attention."
    width, head_width = sizes.length(patches, 0), sizes.length(f"{layer}norm_q.weight", 0)
    return {
        "in_channels": sizes.length(patches, 1) // _PATCH**2,
        "dim": width,
        "n_layers": sizes.count("layers.{}.attention.to_q.weight"),
        "n_refiner_layers": sizes.count("noise_refiner.{}.attention.to_q.weight"),
        "n_heads": width // head_width,
        "n_kv_heads": sizes.length(f"{layer}to_k.weight", 0) // head_width,
        "cap_feat_dim": sizes.length("cap_embedder.1.weight", 1),
    }


def _qwen_image(sizes: _Sizes) -> dict[str, Any]:
    width, norm = sizes.length("img_in.weight", 0), "transformer_blocks.0.attn.norm_q.weight"
    return {
        "in_channels": sizes.length("img_in.weight", 1),
        "out_channels": sizes.length("proj_out.weight", 0) // _PATCH**2,
        "num_layers": sizes.count("transformer_blocks.{}.attn.to_q.weight"),
        "joint_attention_dim": sizes.length("txt_in.weight", 1),
        **sizes.heads(width, norm, "num_attention_heads"),
    }


_SETTINGS: Mapping[str, Callable[[_Sizes], dict[str, Any]]] = {
    "flux": _flux,
    "chroma": _chroma,
    "stable-diffusion-3": _stable_diffusion_3,
    "z-image": _z_image,
    "qwen-image": _qwen_image,
}


def transformer_settings(family: str, shapes: Shapes, origins: Origins) -> dict[str, Any]:
    """Return the settings that the shapes in a file, by its own names, tell of a transformer that is made of it.

    Raises ModelError, which names no file: a shape is none that such a tensor can have.
    """
    ours: Shapes = {}
    for target, origin in origins.items():
        shape = shapes.get(origin.name, ())
        if origin.pieces is not None and shape:
            shape = (shape[0] // origin.pieces.num_pieces * len(origin.pieces.taken), *shape[1:])
        ours[target] = shape
    return _SETTINGS[family](_Sizes(ours))
