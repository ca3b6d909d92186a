import dataclasses

import numpy as np
import pytest

from noria.sampling.compile import compile_sampler
from noria.sampling.tables import (
    NOISE_COLUMN,
    NUM_COLUMNS,
    WINDOW,
    SamplerTable,
    concatenate_tables,
    fold,
    num_columns,
    output_column,
    ring_window,
    sample_column,
    window_of,
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
        ({"init_noise_sigma": np.inf}, "init_noise_sigma"),
        ({"window": WINDOW + 1}, "window"),
        ({"window": 0}, "window"),
        ({"image_weights": np.ones((2, 2), np.float32)}, r"image_weights must have shape \(3, 2\), not \(2, 2\)"),
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


def test_a_call_weighs_the_history_that_its_coefficients_and_later_ones_name():
    assert [table().weighed_from(call) for call in (0, 1)] == [((0,), ()), ((1,), ())]
    calls = 7
    coefficients = np.ones((calls, NUM_COLUMNS), np.float32)
    for call in range(WINDOW - 1):
        coefficients[call, [*range(call + 1, WINDOW), *range(WINDOW + call + 1, 2 * WINDOW)]] = 0
    fields = {"timesteps": np.ones(calls, np.float32), "input_scale": np.ones(calls), "noise": np.ones(calls, bool)}
    whole = table(coefficients=coefficients, **fields)
    assert [whole.weighed_from(call) for call in (0, 2, 6)] == [
        ((0,), ()),
        ((0, 1, 2), (0, 1)),
        ((3, 4, 5, 6), (3, 4, 5)),
    ]


def test_tables_one_after_the_other_have_the_weights_of_the_images_start_and_the_noise_of_both():
    weights = np.arange(6, dtype=np.float32).reshape(3, 2)
    noisy = np.array([True, False])
    joined = concatenate_tables(table(), 1, table())
    for call, row in enumerate(joined.coefficients):
        assert set(np.flatnonzero(row)) == {sample_column(call), output_column(call)}
    assert (joined.timesteps.tolist(), joined.input_scale.tolist()) == ([2, 2, 1], [1, 1, 1])
    joined = concatenate_tables(table(image_weights=weights, noise_dtype="float32"), 1, table(noise=noisy, window=2))
    assert joined.image_weights.tolist() == [[0, 1], [2, 3], [0, 0], [0, 0]]
    assert (joined.noise.tolist(), joined.noise_dtype, joined.window) == ([False, True, False], "model", 2)
    assert concatenate_tables(table(noise=noisy, noise_dtype="float32"), 1, table()).noise_dtype == "float32"
    assert concatenate_tables(table(residual=0.1), 1, table(residual=0.2)).residual == 0.2


def test_a_history_has_the_samples_and_outputs_of_its_window_and_a_noise():
    assert [num_columns(window) for window in (1, 2, WINDOW)] == [3, 5, NUM_COLUMNS]
    assert [window_of(number) for number in (3, 5, NUM_COLUMNS)] == [1, 2, WINDOW]


@pytest.mark.parametrize(("name", "window"), [("ddim", 1), ("dpm++2m", 2), ("unipc", 4), ("pndm", 4)])
def test_folding_keeps_every_coefficient(name, window):
    compiled = compile_sampler(name, {}, 12)
    assert ring_window(compiled.window) == window
    folded = fold(compiled.coefficients, window)
    assert folded.shape == (compiled.num_calls, num_columns(window))
    for row, wide in zip(folded, compiled.coefficients, strict=True):
        assert sorted(row[row != 0]) == sorted(wide[wide != 0])
        assert row[-1] == wide[NOISE_COLUMN]
