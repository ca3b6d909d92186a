"""Checks a folder of the refiner of Stable Diffusion XL, and says which models it can refine.

Read are the second text encoder and its tokenizer, the UNet and the scheduler. A refiner has no first text encoder, and
its VAE is not read: latents are those of the model that is refined.
"""

import filecmp
import pathlib
from typing import NoReturn

from noria.errors import ModelError
from noria.models.diffusion.folders.pipeline_folder import PipelineFolder
from noria.models.diffusion.folders.unet_models.stable_diffusion_xl_folder import check_added_input
from noria.models.diffusion.folders.unet_models.unet_folder import (
    UnetConfig,
    check_does_not_clip,
    check_scheduler,
    check_text_layers,
    check_unet_layer,
    read_text_encoder,
    read_unet,
)
from noria.models.family import Family
from noria.models.files.weights import read_object, read_struct, weight_files
from noria.protocol.diffusion import DiffusionModelSpec

_NUM_SIZES = 5  # original size and crop: two numbers each, and the aesthetic score
_TEXT_ENCODER = "text_encoder_2"
_NO_SETTINGS = ("_name_or_path", "dtype", "torch_dtype", "transformers_version")  # fields of its config.json


def inspect(folder: pathlib.Path, family: Family) -> NoReturn:
    """Raise ModelError: a refiner is no model of its own."""
    raise ModelError(
        f"{folder / family.index_file}: {family.class_names[0]} is the refiner of SDXL, which continues images that "
        f"another model has begun. Serve that model, and name this folder in engine.refiners: --refiners {folder}."
    )


def check_refiner(path: pathlib.Path, family: Family) -> None:
    """Check all parts of a folder. Raises ModelError: a file is damaged, or a part is not supported."""
    index_file = path / "model_index.json"
    index = read_object(index_file)
    if index.get("_class_name") not in family.class_names:
        raise ModelError(
            f"{index_file}: _class_name is {index.get('_class_name')!r}; that of a refiner is {family.class_names[0]}."
        )
    folder = PipelineFolder.open(path, family)
    if index.get("requires_aesthetics_score") is not True:
        raise ModelError(
            f"{index_file}: requires_aesthetics_score is {index.get('requires_aesthetics_score')!r}; supported are "
            "refiners that take a score, as that of SDXL 1.0."
        )
    check_scheduler(folder)
    check_does_not_clip(folder)
    text_encoder = read_text_encoder(folder, "_2")
    unet = read_unet(folder, [text_encoder])
    check_added_input(folder.config_file("unet"), unet, text_encoder.projection_dim, _NUM_SIZES, "this is no refiner")
    check_text_layers(folder, [text_encoder])
    check_unet_layer(folder, unet)


def misfit(folder: pathlib.Path, spec: DiffusionModelSpec) -> str | None:
    """Return why a refiner cannot refine a model's images; None if it can. Raises ModelError: a folder is damaged."""
    if spec.family != "stable-diffusion-xl":
        return f"{spec.name} is not of SDXL"
    theirs, ours = (read_struct(each / "unet" / "config.json", UnetConfig) for each in (spec.path, folder))
    if theirs.time_cond_proj_dim is not None:
        return f"{spec.name} is distilled, and its guidance is no scale for a refiner"
    if theirs.in_channels != ours.in_channels:
        return f"it has {ours.in_channels} channels (of {spec.name} {theirs.in_channels})"
    return None


def has_text_encoder_of(folder: pathlib.Path, spec: DiffusionModelSpec) -> bool:
    """Return whether a refiner's text encoder is the second one of a model, in every byte of its weights."""
    theirs, ours = (each / _TEXT_ENCODER for each in (spec.path, folder))
    if _settings(theirs) != _settings(ours):
        return False
    files = [weight_files(each.parent, _TEXT_ENCODER, "model") for each in (theirs, ours)]
    return len(files[0]) == len(files[1]) and all(
        filecmp.cmp(first, second, shallow=False) for first, second in zip(*files, strict=True)
    )


def _settings(part: pathlib.Path) -> dict[str, object]:
    """Return the configuration of a text encoder, without where it came from and what has saved it."""
    found = read_object(part / "config.json")
    return {name: value for name, value in found.items() if name not in _NO_SETTINGS}
