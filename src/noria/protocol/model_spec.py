"""What the rest of Noria may know of a model without loading it: names, bounds, defaults. Read by `models/catalog.py`."""

import pathlib

from msgspec import Struct


class ModelSpec(Struct, frozen=True):
    """One model folder in diffusers format, as far as admission, documentation and the engine's set-up need it."""

    name: str  # as clients name it; letters, digits and _.+/- only, so that a header carries it
    folder: str
    fingerprint: str  # first 12 hexadecimal digits of a SHA-256 over configurations, weights' headers and data ends
    pipeline: str  # "StableDiffusionPipeline"
    prediction_type: str  # "epsilon" | "v_prediction" | "sample"
    default_width_px: int
    default_height_px: int
    min_side_px: int
    max_side_px: int
    multiple_px: int  # widths and heights are multiples of this
    default_scheduler: str
    schedulers: tuple[str, ...]  # short names that this model can be sampled with
    default_steps: int
    default_guidance: float
    num_parameters: int  # of the UNet

    @property
    def path(self) -> pathlib.Path:
        """The folder as a path."""
        return pathlib.Path(self.folder)
