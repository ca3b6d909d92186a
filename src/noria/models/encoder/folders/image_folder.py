"""Checks and describes how the images of CLIP and SigLIP are made ready for their tower, and the tower. Knows no torch.

The folder's preprocessor_config.json says it, or the `image_processor` of processor_config.json, as transformers writes
them. Pixels are those of its image processors that use Pillow.
"""

import math
import pathlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from noria.errors import ModelError, short_repr
from noria.models.encoder.folders.config_keys import check_model_keys
from noria.models.encoder.folders.tower_config import image_tower
from noria.models.files.weights import REDOWNLOAD_HINT, convert, read_object
from noria.protocol.text import MAX_PIXEL_BYTES, ImageInput, Patches

_Positive = Annotated[int, Meta(ge=1)]
_Side = Annotated[int, Meta(ge=1, le=4096)]
_Factor = Annotated[float, Meta(gt=0, lt=1e6)]
_Mean = Annotated[float, Meta(gt=-1e6, lt=1e6)]

_Triple = tuple[float, float, float]


class _Sides(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    height: _Side | None = None
    width: _Side | None = None
    shortest_edge: _Side | None = None


class _Processor(Struct, frozen=True):
    """The keys of a processor of images that change numbers; a key that is null has the default of its class."""

    image_processor_type: str | None = None
    feature_extractor_type: str | None = None  # its older name
    do_resize: bool | None = None
    size: _Side | _Sides | None = None
    resample: Literal[0, 1, 2, 3, 4, 5] | None = None
    do_center_crop: bool | None = None
    crop_size: _Side | _Sides | None = None
    do_rescale: bool | None = None
    rescale_factor: _Factor | None = None
    do_normalize: bool | None = None
    image_mean: tuple[_Mean, _Mean, _Mean] | None = None
    image_std: tuple[_Factor, _Factor, _Factor] | None = None
    do_pad: bool | None = None
    patch_size: _Positive | None = None  # with the next, for images of any shape
    max_num_patches: Annotated[int, Meta(ge=1, le=4096)] | None = None


class _Defaults(NamedTuple):
    crops: bool
    mean: tuple[float, float, float]
    std: tuple[float, float, float]


_CLASSES: Mapping[str, _Defaults] = {
    "CLIP": _Defaults(True, (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    "Siglip": _Defaults(False, (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
}
"""transformers' processors of images, by the start of their class's name."""
_CLASS_ENDS = ("ImageProcessor", "ImageProcessorFast", "ImageProcessorPil", "FeatureExtractor")
_SIDE_PX, _BICUBIC = 224, 3  # defaults of both
_ANY_SHAPE, _BILINEAR = "Siglip2", 2
_TEXTS_ALONE = "Without this file the model serves texts alone."


class _Tower(Struct, frozen=True):
    hidden_size: _Positive
    num_hidden_layers: _Positive
    patch_size: Annotated[int, Meta(ge=1, le=256)]
    image_size: _Side | None = None
    num_patches: Annotated[int, Meta(ge=1, le=4096)] | None = (
        None  # rows of the table of positions, for images of any shape
    )
    num_channels: Literal[3] = 3
    vision_use_head: Literal[True] = True
    projection_dim: _Positive | None = None


class _TextTower(Struct, frozen=True):
    hidden_size: _Positive
    num_hidden_layers: _Positive = 12


def read_image_input(
    folder: pathlib.Path, text_tree: Mapping[str, Any], dimensions: int
) -> tuple[ImageInput | None, list[str]]:
    """Return how a folder whose texts get `dimensions` numbers encodes images, and the keys that nothing here knows.

    None: the folder has no image tower that is served, or says nothing of images.

    Raises ModelError: they are encoded in a way that is not supported.
    """
    file = folder / "config.json"
    found, processor = image_tower(file, read_object(file)), _read_processor(folder)
    if found is None or processor is None:
        return None, []
    tower, tree = found
    own, text = convert(file, tree, _Tower), convert(file, dict(text_tree), _TextTower)
    width = own.hidden_size if own.projection_dim is None else own.projection_dim
    if width != dimensions:
        raise ModelError(
            f"{file}: images get {width} numbers and texts {dimensions}, which cannot be compared: the parts belong to "
            f"two models. {REDOWNLOAD_HINT}"
        )
    work, text_work = (each.num_hidden_layers * each.hidden_size**2 for each in (own, text))
    described = _describe_any_shape if own.image_size is None else _describe
    image_input, num_patches = described(*processor, tower.architecture, own)
    if image_input.num_bytes > MAX_PIXEL_BYTES:
        raise ModelError(
            f"{processor[0]}: an image has {image_input.num_bytes} bytes as the model sees it; allowed are "
            f"{MAX_PIXEL_BYTES}. Make max_num_patches smaller. {_TEXTS_ALONE}"
        )
    image_input = replace(image_input, num_tokens=max(1, math.ceil(num_patches * work / text_work)))
    return image_input, check_model_keys(file, tree, tower.model_type)


def _read_processor(folder: pathlib.Path) -> tuple[pathlib.Path, dict[str, Any]] | None:
    """Return the file that describes images, and the description; that in processor_config.json takes precedence."""
    file = folder / "processor_config.json"
    if file.exists() and (tree := read_object(file).get("image_processor")):
        if not isinstance(tree, dict):
            raise ModelError(f"{file}: image_processor is {short_repr(tree)}; an object is expected.")
        return file, tree
    file = folder / "preprocessor_config.json"
    return (file, read_object(file)) if file.exists() else None


def _describe_any_shape(
    file: pathlib.Path, tree: dict[str, Any], architecture: str, tower: _Tower
) -> tuple[ImageInput, int]:
    """Return what the description `tree` in `file` says, of a tower that sees images of any shape, and their patches.

    The number of tokens is not set.
    """
    processor = convert(file, tree, _Processor)
    name = processor.image_processor_type
    if name not in [None, *(_ANY_SHAPE + end for end in _CLASS_ENDS)] or processor.do_resize is False:
        key, value = ("do_resize", False) if processor.do_resize is False else ("image_processor_type", name)
        raise ModelError(
            f"{file}: {key} is {short_repr(value)}; images of any shape are supported that {_ANY_SHAPE}ImageProcessor "
            f"resizes. {_TEXTS_ALONE}"
        )
    patches = Patches(processor.patch_size or 16, processor.max_num_patches or 256)
    if patches.side_px != tower.patch_size or math.isqrt(tower.num_patches or 0) ** 2 != tower.num_patches:
        raise ModelError(
            f"{file}: patches have {patches.side_px} pixels a side, but the tower sees {tower.patch_size} (patch_size "
            f"in config.json) and has {tower.num_patches} positions, which must be a square (num_patches). "
            f"{_TEXTS_ALONE}"
        )
    resample = _BILINEAR if processor.resample is None else processor.resample
    scale, shift = _scale_and_shift(processor, _CLASSES["Siglip"])
    return ImageInput(architecture, 0, 0, resample, scale, shift, num_tokens=0, patches=patches), patches.max_number


def _describe(file: pathlib.Path, tree: dict[str, Any], architecture: str, tower: _Tower) -> tuple[ImageInput, int]:
    """Return likewise, of a tower that sees squares."""
    assert tower.image_size is not None
    processor, side_px = convert(file, tree, _Processor), tower.image_size
    name = processor.image_processor_type or processor.feature_extractor_type
    kind = "Siglip" if architecture.startswith("Siglip") else "CLIP"
    if name is not None:
        kind = next((each for each in _CLASSES if name in [each + end for end in _CLASS_ENDS]), "")
    if not kind or processor.do_resize is False or processor.do_pad:
        wrong = ("do_resize", "do_pad") if kind else ("image_processor_type", "feature_extractor_type")
        key = next(each for each in wrong if tree.get(each) not in (None, each == "do_resize"))
        raise ModelError(
            f"{file}: {key} is {short_repr(tree[key])}; images are supported that CLIPImageProcessor or "
            f"SiglipImageProcessor resizes, without padding. {_TEXTS_ALONE}"
        )
    defaults = _CLASSES[kind]
    resized_px = _resized_px(file, processor.size or _SIDE_PX, is_square=kind == "Siglip")
    crops = defaults.crops if processor.do_center_crop is None else processor.do_center_crop
    crop_px = _resized_px(file, processor.crop_size or _SIDE_PX, is_square=True) if crops else resized_px
    smallest = resized_px if isinstance(resized_px, int) else min(resized_px)
    if crop_px != (side_px, side_px) or smallest < side_px:
        raise ModelError(
            f"{file}: images become {_shape(resized_px)}{f', of which {_shape(crop_px)} are seen' if crops else ''}, "
            f"but the tower sees {side_px} × {side_px} (image_size in config.json). {_TEXTS_ALONE}"
        )
    resample = _BICUBIC if processor.resample is None else processor.resample
    scale, shift = _scale_and_shift(processor, defaults)
    image_input = ImageInput(architecture, side_px, resized_px, resample, scale, shift, num_tokens=0)
    return image_input, (side_px // tower.patch_size) ** 2


def _scale_and_shift(processor: _Processor, defaults: _Defaults) -> tuple[_Triple, _Triple]:
    factor = 1.0 if processor.do_rescale is False else (processor.rescale_factor or 1 / 255)
    mean, std = processor.image_mean or defaults.mean, processor.image_std or defaults.std
    if processor.do_normalize is False:
        mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    scale = factor / std[0], factor / std[1], factor / std[2]
    return scale, (-mean[0] / std[0], -mean[1] / std[1], -mean[2] / std[2])


def _resized_px(file: pathlib.Path, size: int | _Sides, *, is_square: bool) -> tuple[int, int] | int:
    """Return height and width, or the shorter side."""
    match size:
        case int():
            return (size, size) if is_square else size
        case _Sides(height=int(height), width=int(width), shortest_edge=None):
            return height, width
        case _Sides(height=None, width=None, shortest_edge=int(shortest)):
            return shortest
    raise ModelError(
        f"{file}: size or crop_size is {short_repr(msgspec.to_builtins(size))}; supported are a number, height and "
        f"width, or shortest_edge of size. {_TEXTS_ALONE}"
    )


def _shape(size: tuple[int, int] | int) -> str:
    return f"{size[0]} × {size[1]}" if isinstance(size, tuple) else f"{size} at the shorter side"
