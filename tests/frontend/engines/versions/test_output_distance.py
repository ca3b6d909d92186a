"""Distances of outputs, against numpy's."""

import numpy as np
import pytest

from noria.frontend.engines.results import EngineResult, RawImage
from noria.frontend.engines.versions.output_distance import output_distance
from noria.protocol.messages import Timings
from noria.protocol.text import TextResult


def images(*pixels: np.ndarray) -> EngineResult:
    made = tuple(RawImage(0, each.shape[1], each.shape[0], memoryview(each.tobytes())) for each in pixels)
    return EngineResult(made, Timings(0.0), 1, 1.0, 1.0)


def numbers(rows: np.ndarray, *row_counts: int) -> EngineResult:
    return EngineResult((), Timings(0.0), 1, 1.0, 1.0, TextResult(*rows.shape, row_counts), memoryview(rows.tobytes()))


def test_of_images_it_is_the_mean_absolute_difference_of_their_pixels() -> None:
    one, other = np.random.default_rng(1).integers(0, 256, (2, 2, 8, 6, 3), np.uint8)
    expected = np.abs(one.astype(float) - other).mean() / 255
    assert output_distance(images(*one), images(*other)) == pytest.approx(expected)
    assert output_distance(images(*one), images(*one)) == 0.0


def test_of_numbers_it_is_the_mean_cosine_distance_of_their_rows() -> None:
    one, other = np.random.default_rng(1).normal(size=(2, 4, 16)).astype(np.float32)
    cosines = (one * other).sum(1) / np.linalg.norm(one, axis=1) / np.linalg.norm(other, axis=1)
    assert output_distance(numbers(one), numbers(other)) == pytest.approx(1 - cosines.mean(), abs=1e-6)
    nothing = np.zeros((4, 16), np.float32)
    assert output_distance(numbers(nothing), numbers(nothing)) == 0.0
    assert output_distance(numbers(one), numbers(nothing)) == 1.0


def test_of_sparse_embeddings_numbers_of_the_same_token_are_compared() -> None:
    one = numbers(np.array([[9000, 3], [9001, 4], [7, 1]], np.float32), 2, 1, 0)
    other = numbers(np.array([[9001, 1], [8, 1]], np.float32), 1, 1, 0)
    assert output_distance(one, other) == pytest.approx((1 - 4 / 5 + 1 + 0) / 3)
    assert output_distance(one, numbers(np.array([[9001, 1]], np.float32), 1)) is None


def test_of_many_rows_some_are_compared() -> None:
    one, other = np.ones((2, 1024, 4), np.float32)
    other[1::2] = 0
    assert output_distance(numbers(one), numbers(other)) == 0.0


def test_other_forms_have_no_distance() -> None:
    square, wide = np.zeros((4, 4, 3), np.uint8), np.zeros((4, 8, 3), np.uint8)
    assert output_distance(images(square), images(wide)) is None
    assert output_distance(images(square), images(square, square)) is None
    assert output_distance(numbers(np.ones((2, 3), np.float32)), numbers(np.ones((2, 4), np.float32))) is None
