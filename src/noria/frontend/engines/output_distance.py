"""How far two results of the same request are from each other. Pure."""

import math
import operator
from collections.abc import Sequence

from PIL import Image, ImageChops, ImageStat

from noria.frontend.engines.results import EngineResult, RawImage


def output_distance(one: EngineResult, other: EngineResult) -> float | None:
    """Return the distance of two outputs; None if their forms differ, for instance the sizes of their images.

    Of images it is the mean absolute difference of their pixels, 0 to 1; of numbers the mean cosine distance of their
    rows, 0 to 2.
    """
    if one.final is not None and other.final is not None:
        return _rows_distance(_rows(one), _rows(other))
    forms = [[(image.width_px, image.height_px) for image in each.images] for each in (one, other)]
    if not one.images or forms[0] != forms[1]:
        return None
    pairs = zip(one.images, other.images, strict=True)
    return math.fsum(_image_distance(*pair) for pair in pairs) / len(one.images)


def _image_distance(one: RawImage, other: RawImage) -> float:
    pixels = (Image.frombuffer("RGB", (each.width_px, each.height_px), bytes(each.rgb)) for each in (one, other))
    return math.fsum(ImageStat.Stat(ImageChops.difference(*pixels)).mean) / (3 * 255)


def _rows(result: EngineResult) -> "list[memoryview[float]]":
    assert result.final is not None and result.data is not None, "numbers come with their description"
    numbers, width = result.data.cast("B").cast("f"), result.final.num_columns
    return [numbers[start : start + width] for start in range(0, result.final.num_rows * width, width)]


def _rows_distance(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> float | None:
    if not one or len(one) != len(other) or len(one[0]) != len(other[0]):
        return None
    return math.fsum(map(_cosine_distance, one, other)) / len(one)


def _cosine_distance(one: Sequence[float], other: Sequence[float]) -> float:
    dot, lengths = math.fsum(map(operator.mul, one, other)), math.hypot(*one) * math.hypot(*other)
    return 1.0 - dot / lengths if lengths else float(math.hypot(*one) != math.hypot(*other))
