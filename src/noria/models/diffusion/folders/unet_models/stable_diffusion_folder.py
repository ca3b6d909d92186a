"""Checks and describes a folder of Stable Diffusion 1.x or 2.x: tokenizer, text_encoder, unet, vae, scheduler."""

import pathlib

from noria.errors import ModelError
from noria.models.diffusion.folders.unet_models.unet_folder import OTHER_INPUT, make_unet_spec, read_folder
from noria.models.family import Family
from noria.protocol.diffusion import DiffusionModelSpec


def inspect(path: pathlib.Path, family: Family) -> DiffusionModelSpec:
    """Check all parts of a folder and return its spec, as `Family.inspect` does."""
    found = read_folder(path, family)
    added = found.unet.addition_embed_type
    if added is not None:
        raise ModelError(f"{found.folder.config_file('unet')}: addition_embed_type is {added!r}: {OTHER_INPUT}")
    is_distilled = found.unet.time_cond_proj_dim is not None  # as LCM
    steps, guidance = (4, 8.0) if is_distilled else (25, 7.5)
    return make_unet_spec(found, steps=steps, guidance=guidance, inpaint_strength=1.0, clip_skip=1)
