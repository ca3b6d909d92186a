"""The properties of a model that are known without loading it, and how an engine calls one that it has measured.

`models/catalog.py` reads the first. Here is what every kind of model has; each kind adds its own in a subclass, such as
`DiffusionModelSpec` in `diffusion.py`, whose tag is the kind.
"""

import pathlib
from typing import ClassVar, NamedTuple

from msgspec import Struct


class ModelKey(NamedTuple):
    """The name and the version that tell loaded models apart."""

    name: str = ""
    version: str = ""  # ModelSpec.fingerprint


class ModelSpec(Struct, frozen=True, kw_only=True):
    """A model folder, as routing, documentation and the engine's set-up see it."""

    kind: ClassVar[str]  # which runtime loads it, and which payload its requests have

    name: str  # in requests; only letters, digits and _.+/-, so that it fits in a header
    folder: str
    # First 12 hexadecimal digits of a SHA-256 over configurations, and headers and ends of the weight files.
    fingerprint: str
    family: str  # a name of models/families.py
    num_parameters: int  # parameters of the part that determines the speed: a diffusion model's UNet

    @property
    def key(self) -> ModelKey:
        """Its name and version."""
        return ModelKey(self.name, self.fingerprint)

    def matches(self, name: str, version: str = "") -> bool:
        """Whether it is this model, in this version (a fingerprint; empty: any)."""
        return self.name == name and version in ("", self.fingerprint)

    @property
    def path(self) -> pathlib.Path:
        """The folder as a path."""
        return pathlib.Path(self.folder)


class CallTrial(Struct, frozen=True):
    """A way to call a denoiser, timed beside the fastest one before it."""

    attention: str  # a value of engine.attention
    compile_blocks: bool
    seconds: dict[int, float] = {}  # median seconds of a call of the default size, by its number of rows
    before_s: dict[int, float] = {}  # those of the other way, made in turns with it
    speedup: float = 1.0  # how many times as fast it is, the geometric mean over the numbers of rows
    is_chosen: bool = False
    error: str = ""  # why it cannot be used
    with_loras: bool = False  # calls with a LoRA in each row, timed beside the same without compiled blocks


class CallChoice(Struct, frozen=True):
    """How an engine calls the denoiser of a model with `engine.compile_blocks` "auto", as its device measured."""

    model: str
    version: str  # ModelSpec.fingerprint
    attention: str
    compile_blocks: bool
    speedup: float  # how many times as fast as without both; 1: neither is chosen
    trials: tuple[CallTrial, ...]  # in the order in which they were made
    compile_loras: bool = False  # whether calls with LoRAs are compiled, too
