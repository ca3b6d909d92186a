"""In which size a model is shown a reference image, as diffusers' pipelines resize it.

Pure: from the size of the file, the rule of the model, and the pixels of a side that are one of its tokens.
"""

import math
from typing import NamedTuple

from noria.errors import InvalidField
from noria.protocol.diffusion import DiffusionModelSpec

FIELD = "reference_images"

_MAX_AREA_PX = 1024 * 1024
_VISION_AREA_PX, _PROMPT_AREA_PX, _VISION_MULTIPLE_PX = 1024 * 1024, 384 * 384, 32  # as the pipelines of Qwen
_MIN_SIDE_PX, _MAX_RATIO = 64, 8  # limits of `Flux2ImageProcessor`
_PREFERRED = (  # widths and heights that FLUX.1 Kontext was trained at; turned ones, too
    (1568, 672),
    (1504, 688),
    (1456, 720),
    (1392, 752),
    (1328, 800),
    (1248, 832),
    (1184, 880),
    (1104, 944),
    (1024, 1024),
)


class ReferencePlacement(NamedTuple):
    """An image is resized to `resized_px`, of which the middle is shown. Widths and heights."""

    resized_px: tuple[int, int]
    shown_px: tuple[int, int]

    @property
    def box_px(self) -> tuple[int, int, int, int]:
        """Return left, top, right and bottom of the middle."""
        left, top = ((all_of - shown) // 2 for all_of, shown in zip(*self, strict=True))
        return left, top, left + self.shown_px[0], top + self.shown_px[1]


def place_reference(name: str, size_px: tuple[int, int], spec: DiffusionModelSpec) -> ReferencePlacement:
    """Return how the model is shown an image of this size, which errors call `name`.

    By "area" it is resized to at most 1024 × 1024 pixels, and its sides are cut to multiples; by "preferred" it is
    resized to the size that FLUX.1 Kontext was trained at with the nearest ratio of sides; by "vision" and "joint" it
    is resized to about 1024 × 1024 pixels.

    Raises InvalidField: it is too small or too narrow.
    """
    width, height = size_px
    if spec.reference_size == "area":
        _check_shape(name, size_px)
        if width * height > _MAX_AREA_PX:
            scale = math.sqrt(_MAX_AREA_PX / (width * height))
            width, height = int(width * scale), int(height * scale)
        return ReferencePlacement((width, height), (_cut(width, spec), _cut(height, spec)))
    if spec.reference_size in ("vision", "joint"):
        _check_shape(name, size_px)
        resized_px = _of_area(_VISION_AREA_PX, size_px)
        return ReferencePlacement(resized_px, resized_px)
    if min(size_px) < spec.multiple_px:
        raise InvalidField(
            f"{name} has {width} × {height} pixels; each side must have at least {spec.multiple_px}.", field=FIELD
        )
    ratio = _cut(width, spec) / _cut(height, spec)
    sizes = [size for wide in _PREFERRED for size in {wide, wide[::-1]}]
    _, width, height = min((abs(ratio - width / height), width, height) for width, height in sizes)
    shown = _cut(width, spec), _cut(height, spec)
    return ReferencePlacement(shown, shown)


def prompt_size(size_px: tuple[int, int], spec: DiffusionModelSpec) -> tuple[int, int]:
    """Return the size in which the text encoder reads an image of this size with the prompt; zeros: it does not."""
    area_px = {"vision": _PROMPT_AREA_PX, "joint": _VISION_AREA_PX}.get(spec.reference_size)
    return (0, 0) if area_px is None else _of_area(area_px, size_px)


def _of_area(area_px: int, size_px: tuple[int, int]) -> tuple[int, int]:
    """Return about this area with these proportions, in multiples, rounded as by the pipeline."""
    ratio = size_px[0] / size_px[1]
    width = math.sqrt(area_px * ratio)
    rounded_width, rounded_height = (
        round(side / _VISION_MULTIPLE_PX) * _VISION_MULTIPLE_PX for side in (width, width / ratio)
    )
    return rounded_width, rounded_height


def _check_shape(name: str, size_px: tuple[int, int]) -> None:
    width, height = size_px
    if min(size_px) < _MIN_SIDE_PX:
        raise InvalidField(
            f"{name} has {width} × {height} pixels; each side must have at least {_MIN_SIDE_PX}.", field=FIELD
        )
    if max(size_px) > _MAX_RATIO * min(size_px):
        raise InvalidField(
            f"{name} has {width} × {height} pixels; the longer side may be at most {_MAX_RATIO} times the shorter one.",
            field=FIELD,
        )


def _cut(side_px: int, spec: DiffusionModelSpec) -> int:
    return side_px // spec.multiple_px * spec.multiple_px
