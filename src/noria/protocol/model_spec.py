"""The properties of a model that are known without loading it: names, bounds, defaults.

`models/catalog.py` reads them.
"""

import pathlib
from typing import Literal

from msgspec import Struct


class ModelSpec(Struct, frozen=True):
    """A model folder in diffusers format, as admission, documentation and the engine's set-up see it."""

    name: str  # in requests; only letters, digits and _.+/-, so that it fits in a header
    folder: str
    # First 12 hexadecimal digits of a SHA-256 over configurations, and headers and ends of the weight files.
    fingerprint: str
    pipeline: str  # "StableDiffusionPipeline"
    prediction_type: str  # "epsilon" | "v_prediction" | "sample"
    default_width_px: int
    default_height_px: int
    min_side_px: int
    max_side_px: int
    multiple_px: int  # widths and heights are multiples of this
    default_scheduler: str
    schedulers: tuple[str, ...]  # short names of those that the model supports
    default_steps: int
    default_guidance: float
    num_parameters: int  # of the UNet
    kind: Literal["diffusion"] = "diffusion"  # which runtime loads it, and which payload its requests have

    def matches(self, name: str, version: str = "") -> bool:
        """Whether it is this model, in this version (a fingerprint; empty: any)."""
        return self.name == name and version in ("", self.fingerprint)

    @property
    def path(self) -> pathlib.Path:
        """The folder as a path."""
        return pathlib.Path(self.folder)
