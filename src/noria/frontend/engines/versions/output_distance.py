"""How far two results of the same request are from each other. Pure."""

import itertools
import math
import operator
from collections.abc import Sequence
from typing import TypeVar

from PIL import Image, ImageChops, ImageStat

from noria.frontend.engines.results import EngineResult, RawImage

T = TypeVar("T")

_MAX_ROWS = 256  # compared of one request: vectors of tokens may be 100,000


def output_distance(one: EngineResult, other: EngineResult) -> float | None:
    """Return the distance of two outputs; None if their forms differ, for instance the sizes of their images.

    Of images that are not refused it is the mean absolute difference of their pixels, 0 to 1; of numbers the mean
    cosine distance of their rows, 0 to 2: at most 256 rows, evenly spread. Of sparse embeddings a row is a text's.
    """
    if one.final is not None and other.final is not None:
        if one.final.row_counts and other.final.row_counts:
            return _sparse_distance(_sparse_rows(one), _sparse_rows(other))
        return _rows_distance(_rows(one), _rows(other))
    forms = [[(image.width_px, image.height_px, image.is_refused) for image in each.images] for each in (one, other)]
    pairs = [pair for pair in zip(one.images, other.images, strict=False) if not pair[0].is_refused]
    if not pairs or forms[0] != forms[1]:
        return None
    return math.fsum(_image_distance(*pair) for pair in pairs) / len(pairs)


def _image_distance(one: RawImage, other: RawImage) -> float:
    pixels = (Image.frombuffer("RGB", (each.width_px, each.height_px), bytes(each.rgb)) for each in (one, other))
    return math.fsum(ImageStat.Stat(ImageChops.difference(*pixels)).mean) / (3 * 255)


def _rows(result: EngineResult) -> "list[memoryview[float]]":
    assert result.final is not None and result.data is not None, "numbers come with their description"
    numbers, width = result.data.cast("B").cast("f"), result.final.num_columns
    return [numbers[row * width : (row + 1) * width] for row in range(result.final.num_rows)]


def _sparse_rows(result: EngineResult) -> list[dict[float, float]]:
    """Return the numbers of each text by the ids of their tokens."""
    assert result.final is not None
    rows, counts = iter(_rows(result)), result.final.row_counts
    return [{row[0]: row[1] for row in itertools.islice(rows, count)} for count in counts]


def _sparse_distance(one: Sequence[dict[float, float]], other: Sequence[dict[float, float]]) -> float | None:
    if len(one) != len(other):
        return None
    pairs = _spread(list(zip(one, other, strict=True)))
    distances = [
        _cosine_distance(*([each.get(token, 0.0) for token in first | second] for each in (first, second)))
        for first, second in pairs
    ]
    return math.fsum(distances) / len(distances)


def _spread(pairs: list[T]) -> list[T]:
    """Return all pairs, or so many as are compared, evenly spread."""
    num = min(len(pairs), _MAX_ROWS)
    return [pairs[index * len(pairs) // num] for index in range(num)]


def _rows_distance(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> float | None:
    if not one or len(one) != len(other) or len(one[0]) != len(other[0]):
        return None
    pairs = _spread(list(zip(one, other, strict=True)))
    return math.fsum(itertools.starmap(_cosine_distance, pairs)) / len(pairs)


def _cosine_distance(one: Sequence[float], other: Sequence[float]) -> float:
    dot, lengths = math.fsum(map(operator.mul, one, other)), math.hypot(*one) * math.hypot(*other)
    return 1.0 - dot / lengths if lengths else float(math.hypot(*one) != math.hypot(*other))
