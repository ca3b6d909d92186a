"""The model families that Noria serves. A new family is a row of `FAMILIES` and the two modules that the row names.

The class that a folder's model_index.json (diffusers) or config.json (transformers) names says its family. The folder's
files also name the classes of its parts; only a class that the family lists is ever looked up in a library. This module
imports neither the libraries nor the families' modules until a folder is inspected or a model loaded.
"""

import importlib
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from noria.config import EngineConfig
from noria.errors import ModelError, short_repr
from noria.models.weights import REDOWNLOAD_HINT, read_object
from noria.protocol.messages import AnyModelSpec
from noria.protocol.model_spec import ModelSpec

_CLASS_KEYS = {"model_index.json": ("_class_name",), "config.json": ("architectures", "model_type")}
"""Where a folder names its class: in the first of these files that it has, under these keys."""


@dataclass(frozen=True, slots=True)
class Part:
    """A subfolder of a model folder, or (by the name "") the model folder itself."""

    classes: tuple[str, ...] = ()  # of diffusers and transformers that a folder can name
    weights: str = ""  # its weight files, without variant, shard and ".safetensors"; empty: it has none


@dataclass(frozen=True, slots=True)
class Family:
    """Model folders that are checked and loaded by the same code."""

    name: str
    description: str  # for messages
    kind: str  # a key of `_LOADERS` in engine/runtime.py
    file: str  # which of `_CLASS_KEYS` names one of the classes below
    class_names: tuple[str, ...]
    parts: Mapping[str, Part]
    inspector: str  # module without torch; its `inspect(folder, family)` returns the spec
    model: str  # "module:class"; its `load(spec, config, device)` returns what the kind's runtime runs

    @property
    def weight_stems(self) -> Mapping[str, str]:
        """What `Part.weights` says of each part that has weights."""
        return {name: part.weights for name, part in self.parts.items() if part.weights}

    def check_class(self, file: pathlib.Path, part: str, name: object) -> str:
        """Return `name`, the class that `file` gives for `part`.

        Raises:
            ModelError: the family does not list that class for that part.

        """
        allowed = self.parts[part].classes
        if name not in allowed:
            raise ModelError(f"{file}: the {part} is a {short_repr(name)}; supported: {', '.join(allowed)}.")
        return str(name)

    def inspect(self, folder: pathlib.Path) -> AnyModelSpec:
        """Check a folder and return its spec, without name and fingerprint.

        Raises:
            ModelError: a file is damaged, or a part is not supported.

        """
        spec: AnyModelSpec = importlib.import_module(self.inspector).inspect(folder, self)
        return spec

    def load(self, spec: ModelSpec, config: EngineConfig, device: str) -> Any:
        """Load the model onto `device`; `config` has no "auto" left.

        Raises:
            ModelError: a part cannot be loaded.

        """
        module, _, model_class = self.model.partition(":")
        return getattr(importlib.import_module(module), model_class).load(spec, config, device)


_ROWS = (
    Family(
        "stable-diffusion",
        "Stable Diffusion 1.x, 2.x and models with the same parts",
        "diffusion",
        "model_index.json",
        ("StableDiffusionPipeline",),
        MappingProxyType(
            {
                "tokenizer": Part(("CLIPTokenizer", "CLIPTokenizerFast")),
                "text_encoder": Part(("CLIPTextModel",), "model"),
                "unet": Part(("UNet2DConditionModel",), "diffusion_pytorch_model"),
                "vae": Part(("AutoencoderKL", "AutoencoderTiny"), "diffusion_pytorch_model"),
                "scheduler": Part(),  # images/scheduler_names.py knows its classes
            }
        ),
        "noria.models.diffusion.stable_diffusion_folder",
        "noria.models.diffusion.stable_diffusion:StableDiffusion",
    ),
)

FAMILIES: Mapping[str, Family] = MappingProxyType({family.name: family for family in _ROWS})


def identify_family(folder: pathlib.Path) -> Family:
    """Return the family of a model folder.

    Raises:
        ModelError: the folder names no class, or only classes that no family has.

    """
    file = next((folder / name for name in _CLASS_KEYS if (folder / name).exists()), None)
    if file is None:
        raise ModelError(
            f"{folder / 'model_index.json'}: missing, and so is config.json: the folder is not a model in diffusers or "
            f"transformers format. {REDOWNLOAD_HINT}"
        )
    tree = read_object(file)
    found = {key: tree.get(key) for key in _CLASS_KEYS[file.name]}
    architectures = found.get("architectures")
    names = [*found.values(), *(architectures if isinstance(architectures, list) else ())]
    for family in FAMILIES.values():
        if family.file == file.name and any(name in family.class_names for name in names):
            return family
    got = " and ".join(f"{key} is {short_repr(value)}" for key, value in found.items())
    known = ", ".join(f"{name} ({family.description})" for family in FAMILIES.values() for name in family.class_names)
    raise ModelError(f"{file}: {got}, which no model family has. Known are: {known}.")
