"""The towers of models of texts and images: which are served, and their parts of config.json. Knows no torch.

A tower has its own projection, so that its embeddings are those that the model compares with images'.
"""

import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from noria.errors import ModelError, short_repr
from noria.models.encoder.folders.config_keys import READ_KEYS


class Tower(NamedTuple):
    """A class of transformers that computes texts alone."""

    architecture: str
    width: str  # the key of its embedding's numbers
    output: int  # the place of the embedding among its outputs
    defaults: Mapping[str, Any]  # transformers', of keys that folders leave out
    fills_texts: bool = False  # whether texts are filled up to the maximum length, with tokens that it sees


_SIGLIP = {"vocab_size": 32_000, "hidden_size": 768, "max_position_embeddings": 64}

TOWERS: Mapping[str, Tower] = {
    "clip_text_model": Tower(
        "CLIPTextModelWithProjection",
        "projection_dim",
        0,
        {
            "vocab_size": 49_408,
            "hidden_size": 512,
            "max_position_embeddings": 77,
            "projection_dim": 512,
            "eos_token_id": 49_407,
        },
    ),
    "siglip_text_model": Tower("SiglipTextModel", "projection_size", 1, _SIGLIP, fills_texts=True),
    "siglip2_text_model": Tower("Siglip2TextModel", "projection_size", 1, _SIGLIP, fills_texts=True),
}
"""Towers by their `model_type`."""

DOUBLE_TOWERS: Mapping[str, tuple[str, str]] = {
    "clip": ("CLIPModel", "clip_text_model"),
    "siglip": ("SiglipModel", "siglip_text_model"),
    "siglip2": ("Siglip2Model", "siglip2_text_model"),
}
"""The class of a model of texts and images, and the `model_type` of its text tower, by its own `model_type`."""


class ImageTower(NamedTuple):
    """A class of transformers that computes images alone."""

    architecture: str
    model_type: str
    output: int  # the place of the embedding among its outputs
    defaults: Mapping[str, Any]  # transformers', of keys that folders leave out


_VISION = {"hidden_size": 768, "num_hidden_layers": 12}
_SQUARE = {**_VISION, "image_size": 224}

IMAGE_TOWERS: Mapping[str, ImageTower] = {
    "clip": ImageTower("CLIPVisionModelWithProjection", "clip_vision_model", 0, {**_SQUARE, "patch_size": 32}),
    "siglip": ImageTower("SiglipVisionModel", "siglip_vision_model", 1, {**_SQUARE, "patch_size": 16}),
    "siglip2": ImageTower(
        "Siglip2VisionModel", "siglip2_vision_model", 1, {**_VISION, "num_patches": 256, "patch_size": 16}
    ),
}
"""The image towers that are served, by the `model_type` of the model. Images of `siglip2` have any shape."""

CLIP_FOLDER = "0_CLIPModel"
"""The subfolder in which sentence-transformers before 5.4 wrote a CLIP model, with all of its files."""

_PARTS = ("text_config", "text_config_dict", "vision_config", "vision_config_dict")
_SCALES = ("logit_scale", "logit_bias")
OTHER_TOWER = ("vision_model.", "visual_projection.", *_SCALES)
"""The start of the names of tensors that texts do not need."""
TEXT_TOWER = ("text_model.", "text_projection.", *_SCALES)
"""The start of the names of tensors that images do not need."""


def text_tower(file: pathlib.Path, tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of the text tower in `tree`, that of config.json; of any other model `tree` itself.

    Raises ModelError: the class or a part is not of such a model.
    """
    whole = str(tree.get("model_type"))
    if whole not in DOUBLE_TOWERS:
        tower = TOWERS.get(whole)
        return {**tree} if tower is None else _with_defaults(file, tower, tree, tower.architecture)
    architecture, model_type = DOUBLE_TOWERS[whole]
    part = _part(file, tree, "text_config", model_type)
    others = {name: value for name, value in tree.items() if name not in (*_PARTS, *READ_KEYS[model_type])}
    text = {**others, **part, "model_type": model_type, "architectures": tree.get("architectures")}
    if whole == "clip":
        text["projection_dim"] = tree.get("projection_dim", 512)
    return _with_defaults(file, TOWERS[model_type], text, architecture)


def image_tower(file: pathlib.Path, tree: Mapping[str, Any]) -> tuple[ImageTower, dict[str, Any]] | None:
    """Return the image tower of `tree`, that of config.json, and its configuration; None: there is none, or not served.

    Raises ModelError: the part is not of such a model.
    """
    whole = str(tree.get("model_type"))
    if (tower := IMAGE_TOWERS.get(whole)) is None:
        return None
    images = {**tower.defaults, **_part(file, tree, "vision_config", tower.model_type), "model_type": tower.model_type}
    if whole == "clip":
        images["projection_dim"] = tree.get("projection_dim", 512)
    return tower, images


def _part(file: pathlib.Path, tree: Mapping[str, Any], key: str, model_type: str) -> dict[str, Any]:
    """Return a part of `tree`; CLIP's older `…_dict` takes precedence, with the defaults of what it leaves out."""
    if tree.get("model_type") == "clip" and tree.get(f"{key}_dict") is not None:
        key = f"{key}_dict"
    part = tree.get(key) or {}
    if not isinstance(part, dict) or part.get("model_type", model_type) != model_type:
        raise ModelError(f"{file}: {key} is {short_repr(part)}; an object of the model_type {model_type} is expected.")
    return part


def _with_defaults(file: pathlib.Path, tower: Tower, tree: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    named = tree.get("architectures")
    if named not in (None, [architecture]):
        raise ModelError(
            f"{file}: architectures is {short_repr(named)}; of the model_type {tree['model_type']} only {architecture} "
            "is served, for its embeddings of texts."
        )
    text = {**tower.defaults, **tree, "architectures": [tower.architecture]}
    if text.get(tower.width) is None:
        text[tower.width] = text["hidden_size"]
    return text
