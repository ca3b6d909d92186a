"""Checks and describes a folder of Stable Diffusion 1.x or 2.x: tokenizer, text_encoder, unet, vae, scheduler.

This module knows neither torch nor what the parts compute; `stable_diffusion.py` loads them.
"""

import pathlib

from noria.errors import ModelError
from noria.models.diffusion.folders.unet_models.unet_folder import OTHER_INPUT, make_unet_spec, read_folder
from noria.models.families import Family
from noria.protocol.diffusion import DiffusionModelSpec


def inspect(folder: pathlib.Path, family: Family) -> DiffusionModelSpec:
    """Check all parts of a folder and return its spec, without name and fingerprint.

    Raises:
        ModelError: a file is damaged, or a part is not supported.

    """
    found = read_folder(folder, family)
    added, unet_file = found.unet.addition_embed_type, folder / "unet" / "config.json"
    if added is not None:
        raise ModelError(f"{unet_file}: addition_embed_type is {added!r}: {OTHER_INPUT}")
    is_distilled = found.unet.time_cond_proj_dim is not None  # as LCM
    steps, guidance = (4, 8.0) if is_distilled else (25, 7.5)
    return make_unet_spec(folder, family, found, steps=steps, guidance=guidance, inpaint_strength=1.0)
