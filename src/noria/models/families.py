"""The model families that Noria serves. A new family is a row of `FAMILIES` and the module that the row names.

`_class_name` in a folder's model_index.json says its family. The folder's files also name the classes of its parts;
only a class that the family lists is ever looked up in a library. This module imports neither torch nor the families'
modules until a model is loaded.
"""

import importlib
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

from noria.config import EngineConfig
from noria.errors import ModelError, short_repr
from noria.models.weights import read_object
from noria.protocol.model_spec import ModelSpec

if TYPE_CHECKING:
    from noria.models.diffusion.diffusion_model import DiffusionModel


@dataclass(frozen=True, slots=True)
class Family:
    """One kind of model folder."""

    class_name: str  # `_class_name` in model_index.json
    description: str  # for messages
    # by part: the classes of diffusers and transformers that a folder can name
    part_classes: Mapping[str, tuple[str, ...]]
    module: str  # has the class below
    model_class: str  # its `load(spec, config, device)` returns the model

    def check_class(self, file: pathlib.Path, part: str, name: object) -> str:
        """Return `name`, the class that `file` gives for `part`.

        Raises:
            ModelError: the family does not list that class for that part.

        """
        allowed = self.part_classes[part]
        if name not in allowed:
            raise ModelError(f"{file}: the {part} is a {short_repr(name)}; supported: {', '.join(allowed)}.")
        return str(name)


_ROWS = (
    Family(
        "StableDiffusionPipeline",
        "Stable Diffusion 1.x, 2.x and models with the same parts",
        MappingProxyType(
            {
                "tokenizer": ("CLIPTokenizer", "CLIPTokenizerFast"),
                "text_encoder": ("CLIPTextModel",),
                "unet": ("UNet2DConditionModel",),
                "vae": ("AutoencoderKL", "AutoencoderTiny"),
            }
        ),
        "noria.models.diffusion.stable_diffusion",
        "StableDiffusion",
    ),
)

FAMILIES: Mapping[str, Family] = MappingProxyType({family.class_name: family for family in _ROWS})


def identify_family(folder: pathlib.Path) -> Family:
    """Return the family of a model folder in diffusers format.

    Raises:
        ModelError: the folder has no readable model_index.json, or names a class that no family has.

    """
    file = folder / "model_index.json"
    class_name = read_object(file, "the folder is not a model in diffusers format").get("_class_name")
    if isinstance(class_name, str) and class_name in FAMILIES:
        return FAMILIES[class_name]
    known = ", ".join(f"{family.class_name} ({family.description})" for family in FAMILIES.values())
    raise ModelError(f"{file}: _class_name is {short_repr(class_name)}, which no model family has. Known are: {known}.")


def load_model(spec: ModelSpec, config: EngineConfig, device: str) -> "DiffusionModel":
    """Import the family's module and load the model onto `device`; `config` has no "auto" left.

    Raises:
        ModelError: a part cannot be loaded.

    """
    family = FAMILIES[spec.pipeline]
    model: DiffusionModel = getattr(importlib.import_module(family.module), family.model_class).load(
        spec, config, device
    )
    return model
