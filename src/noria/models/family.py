"""A family: model folders that are checked and loaded by the same code, whose modules are imported only then."""

import fnmatch
import pathlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from noria.config import EngineConfig
from noria.errors import ConfigError, ModelError, short_repr
from noria.extras import check_installed
from noria.models.files.weights import read_text
from noria.protocol.kinds import AnyModelSpec
from noria.protocol.model_spec import ModelSpec

MASKLESS_ATTENTION = ("flash", "sage", "_flash_3", "_native_flash")


@dataclass(frozen=True, slots=True)
class Part:
    """A subfolder of a model folder, or (by the name "") the model folder itself."""

    classes: tuple[str, ...] = ()  # classes of diffusers and transformers that a folder can name
    weights: str = ""  # its weight files, without variant, shard and ".safetensors"; empty: it has none
    # False: its files are downloaded and checked, but only one content is allowed, so that they identify no model.
    is_identifying: bool = True
    is_optional: bool = False  # folders without it are complete, although it has weights
    config: str = "config.json"  # the file that describes it


@dataclass(frozen=True, slots=True)
class Family:
    """Model folders that are checked and loaded by the same code."""

    name: str
    description: str  # for messages
    class_names: tuple[str, ...]  # one of which the index file names
    parts: Mapping[str, Part]  # by their subfolders; a name with `*` is for those of modules.json that match it
    # "module:name" of what is called, which is imported only then:
    inspect_with: str  # (folder, family) → spec; the module must not import torch
    load_with: str  # (spec, config, device) → what the kind's runtime runs
    index_file: str = "model_index.json"  # a key of `INDEX_FILES`
    extra: str = "diffusion"  # the extra of noria-serve that installs the packages below
    packages: tuple[str, ...] = ("torch", "diffusers", "transformers")  # that serving it needs
    attention: tuple[str, ...] = ("sdpa",)  # the values of `engine.attention` that its masks allow
    # The dtype of a diffusion model on a GPU, unless the operator chooses: not where float16 overflows.
    gpu_dtype: str = "float16"

    @property
    def weight_stems(self) -> Mapping[str, str]:
        """`Part.weights` of each part that has weights and is in every folder, by its name."""
        return {name: part.weights for name, part in self.parts.items() if part.weights and not part.is_optional}

    def parts_in(self, folder: pathlib.Path) -> Mapping[str, Part]:
        """Return `parts`, with the subfolders of modules.json in place of a name with `*` that they match."""
        named = [name for name in _module_paths(folder) if name not in self.parts]
        return {
            name: part
            for pattern, part in self.parts.items()
            for name in (
                [each for each in named if fnmatch.fnmatchcase(each, pattern)] if "*" in pattern else [pattern]
            )
        }

    def weight_stems_in(self, folder: pathlib.Path) -> Mapping[str, str]:
        """Return likewise those that a folder has, optional parts included."""
        return {
            name: part.weights
            for name, part in self.parts_in(folder).items()
            if part.weights and (not part.is_optional or (folder / name / part.config).exists())
        }

    def check_class(self, file: pathlib.Path, part: str, name: object) -> str:
        """Return `name`, the class that `file` gives for `part`.

        Raises ModelError: the family does not list that class for that part.
        """
        allowed = self.parts[part].classes
        if name not in allowed:
            raise ModelError(f"{file}: the {part or 'model'} is a {short_repr(name)}; supported: {', '.join(allowed)}.")
        return str(name)

    def check_attention(self, name: str) -> str:
        """Return `name`, a value of `engine.attention`, and for "auto" torch's own.

        Raises ConfigError: it cannot compute what the family's calls need.
        """
        if name == "auto":
            return "sdpa"
        if name not in self.attention:
            reason = ", because it takes no masks" if name in MASKLESS_ATTENTION and len(self.attention) > 1 else ""
            raise ConfigError(
                f"engine.attention is {name!r}, which {self.name} does not allow{reason}; allowed are auto, "
                f"{', '.join(self.attention)}."
            )
        return name

    def inspect(self, folder: pathlib.Path) -> AnyModelSpec:
        """Check a folder and return its spec, without name and fingerprint.

        Raises:
            MissingExtra: a package that serving it needs is not installed.
            ModelError: a file is damaged, or a part is not supported.
        """
        check_installed(self.packages, self.extra, f"the model in {folder}")
        spec: AnyModelSpec = pkgutil.resolve_name(self.inspect_with)(folder, self)
        return spec

    def load(self, spec: ModelSpec, config: EngineConfig, device: str) -> Any:
        """Load the model onto `device`; `config` has no "auto" left. Raises ModelError: a part cannot be loaded."""
        return pkgutil.resolve_name(self.load_with)(spec, config, device)


def _module_paths(folder: pathlib.Path) -> list[str]:
    """Return the subfolders that modules.json names; none if it is not what sentence-transformers writes."""
    file = folder / "modules.json"
    try:
        modules = msgspec.json.decode(read_text(file), type=list[dict[str, Any]]) if file.exists() else []
    except (msgspec.DecodeError, UnicodeDecodeError):
        return []
    return sorted({str(each.get("path")) for each in modules if each.get("path")})
