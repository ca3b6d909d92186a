import dataclasses

import numpy as np
import pytest

from noria.sampling.compile import compile_sampler
from noria.sampling.tables import (
    NOISE_COLUMN,
    NUM_COLUMNS,
    WINDOW,
    SamplerTable,
    fold,
    num_columns,
    output_column,
    ring_window,
    sample_column,
)


def table(**changes) -> SamplerTable:
    """A table of two calls, each x + m."""
    coefficients = np.zeros((2, NUM_COLUMNS), np.float32)
    for call in range(2):
        coefficients[call, [sample_column(call), output_column(call)]] = 1
    fields = {
        "scheduler": "test",
        "num_steps": 2,
        "timesteps": np.array([2, 1], np.float32),
        "input_scale": np.ones(2, np.float32),
        "coefficients": coefficients,
        "noise": np.zeros(2, bool),
        "noise_dtype": "model",
        "init_noise_sigma": 1.0,
        "window": 1,
        "residual": 0.0,
    }
    return SamplerTable(**(fields | changes))


def coefficients_with(call: int, column: int) -> np.ndarray:
    coefficients = np.zeros((2, NUM_COLUMNS), np.float32)
    coefficients[call, column] = 1
    return coefficients


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"timesteps": np.ones(3, np.float32)}, "the same length"),
        ({"timesteps": np.ones(0, np.float32), "input_scale": np.ones(0), "noise": np.zeros(0, bool)}, "length"),
        ({"coefficients": np.zeros((2, 3), np.float32)}, "shape"),
        ({"input_scale": np.array([1, np.nan], np.float32)}, "not a number"),
        ({"init_noise_sigma": 0.0}, "init_noise_sigma"),
        ({"window": WINDOW + 1}, "window"),
        ({"image_weights": np.ones((2, 2), np.float32)}, "image_weights must have shape"),
        ({"image_weights": np.full((3, 2), np.nan, np.float32)}, "not a number"),
        ({"coefficients": coefficients_with(1, NOISE_COLUMN)}, "without noise"),
        ({"coefficients": coefficients_with(0, sample_column(3))}, "before the first call"),
        ({"coefficients": coefficients_with(1, output_column(2))}, "before the first call"),
    ],
)
def test_a_table_that_violates_an_invariant_is_rejected(changes, problem):
    with pytest.raises(ValueError, match=problem):
        table(**changes)


def test_a_table_is_read_only():
    read_only = table()
    assert read_only.num_calls == 2
    with pytest.raises(ValueError, match="read-only"):
        read_only.coefficients[0, 0] = 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        read_only.num_steps = 3


@pytest.mark.parametrize(("name", "window"), [("ddim", 1), ("dpm++2m", 2), ("unipc", 4), ("pndm", 4)])
def test_folding_keeps_every_coefficient(name, window):
    compiled = compile_sampler(name, {}, 12)
    assert ring_window(compiled.window) == window
    folded = fold(compiled.coefficients, window)
    assert folded.shape == (compiled.num_calls, num_columns(window))
    for row, wide in zip(folded, compiled.coefficients, strict=True):
        assert sorted(row[row != 0]) == sorted(wide[wide != 0])
        assert row[-1] == wide[NOISE_COLUMN]
