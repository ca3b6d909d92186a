"""Checks and describes a folder of Stable Diffusion XL: two tokenizers and text encoders, unet, vae, scheduler."""

import pathlib

from noria.errors import ModelError
from noria.models.diffusion.folders.unet_models.unet_folder import (
    UnetConfig,
    check_does_not_clip,
    make_unet_spec,
    read_folder,
)
from noria.models.family import Family
from noria.models.files.weights import REDOWNLOAD_HINT
from noria.protocol.diffusion import DiffusionModelSpec

CLIP_SKIP = 2
"""The layer of its text encoders that the family reads, from the end."""

_NUM_SIZES = 6  # original size, crop, target size: two numbers each


def inspect(path: pathlib.Path, family: Family) -> DiffusionModelSpec:
    """Check all parts of a folder and return its spec, as `Family.inspect` does."""
    found = read_folder(path, family)
    check_added_input(
        found.folder.config_file("unet"),
        found.unet,
        found.text_encoders[-1].projection_dim,
        _NUM_SIZES,
        "this is the refiner, which is no model of its own: see engine.refiners",
    )
    check_does_not_clip(found.folder)
    is_distilled = found.unet.time_cond_proj_dim is not None  # as LCM
    # Inpainting has the pipeline's. At strength 1 its authors found the images less sharp.
    steps, guidance = (4, 8.0) if is_distilled else (25, 7.5 if found.needs_mask else 5.0)
    return make_unet_spec(found, steps=steps, guidance=guidance, inpaint_strength=0.9999, clip_skip=CLIP_SKIP)


def check_added_input(unet_file: pathlib.Path, unet: UnetConfig, pooled_width: int, num_sizes: int, else_: str) -> None:
    """Check that the UNet takes the pooled text and so many numbers, in their widths; `else_` is what it may be."""
    if unet.addition_embed_type != "text_time":
        raise ModelError(
            f"{unet_file}: addition_embed_type is {unet.addition_embed_type!r}; a UNet of SDXL has 'text_time'."
        )
    width = pooled_width + num_sizes * (unet.addition_time_embed_dim or 0)
    if unet.projection_class_embeddings_input_dim != width:
        raise ModelError(
            f"{unet_file}: projection_class_embeddings_input_dim is {unet.projection_class_embeddings_input_dim}, but "
            f"the second text encoder's projection_dim {pooled_width} and {num_sizes} numbers of "
            f"addition_time_embed_dim {unet.addition_time_embed_dim} make {width}: the parts belong to two models, or "
            f"{else_}. {REDOWNLOAD_HINT}"
        )
