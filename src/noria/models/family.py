"""A family: model folders that are checked and loaded by the same code, whose modules are imported only then."""

import pathlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from noria.config import EngineConfig
from noria.errors import ConfigError, ModelError, short_repr
from noria.extras import check_installed
from noria.protocol.kinds import AnyModelSpec
from noria.protocol.model_spec import ModelSpec

MASKLESS_ATTENTION = ("flash", "sage", "_flash_3", "_native_flash")


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
    class_names: tuple[str, ...]  # one of which the index file names
    parts: Mapping[str, Part]
    # "module:name" of what is called, which is imported only then:
    inspect_with: str  # (folder, family) → spec; the module must not import torch
    load_with: str  # (spec, config, device) → what the kind's runtime runs
    index_file: str = "model_index.json"  # a key of `INDEX_FILES`
    extra: str = "diffusion"  # of noria-serve, which installs the packages below
    packages: tuple[str, ...] = ("torch", "diffusers", "transformers")  # that serving it needs
    attention: tuple[str, ...] = ("sdpa",)  # the values of `engine.attention` that its masks allow
    # Of a diffusion model on a GPU, unless the operator chooses: not where float16 overflows.
    gpu_dtype: str = "float16"

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
            raise ModelError(f"{file}: the {part or 'model'} is a {short_repr(name)}; supported: {', '.join(allowed)}.")
        return str(name)

    def check_attention(self, name: str) -> str:
        """Return `name`, a value of `engine.attention`, and for "auto" torch's own.

        Raises:
            ConfigError: it cannot compute what the family's calls need.

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
        """Load the model onto `device`; `config` has no "auto" left.

        Raises:
            ModelError: a part cannot be loaded.

        """
        return pkgutil.resolve_name(self.load_with)(spec, config, device)
