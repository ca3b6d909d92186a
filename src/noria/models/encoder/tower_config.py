"""The text towers of models of texts and images: which are served, and their part of config.json. Knows no torch.

A tower has its own projection, so that its embeddings are those that the model compares with images'.
"""

import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from noria.errors import ModelError, short_repr
from noria.models.encoder.config_keys import READ_KEYS


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

CLIP_FOLDER = "0_CLIPModel"
"""The subfolder in which sentence-transformers before 5.4 wrote a CLIP model, with all of its files."""

_PARTS = ("text_config", "text_config_dict", "vision_config", "vision_config_dict")
OTHER_TOWER = ("vision_model.", "visual_projection.", "logit_scale", "logit_bias")
"""The start of the names of tensors that texts do not need."""


def text_tower(file: pathlib.Path, tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration of the text tower in `tree`, that of config.json; of any other model `tree` itself.

    Raises ModelError: the class or a part is not of such a model.
    """
    whole = str(tree.get("model_type"))
    if whole not in DOUBLE_TOWERS:
        tower = TOWERS.get(whole)
        return {**tree} if tower is None else _with_defaults(file, tower, tree, tower.architecture)
    architecture, model_type = DOUBLE_TOWERS[whole]
    # CLIP's older text_config_dict takes precedence, with the defaults of what it leaves out.
    key = "text_config_dict" if whole == "clip" and tree.get("text_config_dict") is not None else "text_config"
    part = tree.get(key) or {}
    if not isinstance(part, dict) or part.get("model_type", model_type) != model_type:
        raise ModelError(f"{file}: {key} is {short_repr(part)}; an object of the model_type {model_type} is expected.")
    others = {name: value for name, value in tree.items() if name not in (*_PARTS, *READ_KEYS[model_type])}
    text = {**others, **part, "model_type": model_type, "architectures": tree.get("architectures")}
    if whole == "clip":
        text["projection_dim"] = tree.get("projection_dim", 512)
    return _with_defaults(file, TOWERS[model_type], text, architecture)


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
