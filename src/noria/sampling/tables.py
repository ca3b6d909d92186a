"""A compiled sampler: the coefficients that take one image from noise to its final latent, a row for each model call.

Row i: the model's inputs are `input_scale[i] · x_i` and `timesteps[i]`; with its output m_i and the noise n_i,

    x_{i+1} = Σ_k a[i,k]·x_{i-k} + Σ_k b[i,k]·m_{i-k} + c[i]·n_i        0 ≤ k < WINDOW

The history is a ring, so a step moves no data. Column j of `coefficients` is the weight of column j of the history:

    j = 0 … WINDOW-1            the sample x_q         with q ≡ j (mod WINDOW)
    j = WINDOW … 2·WINDOW-1     the model's output m_q with q ≡ j (mod WINDOW)
    j = 2·WINDOW                the noise n_i

A sampler that begins with an image has only the last calls, and says how the image becomes a sample: before call i
with the noise n of the start,

    x_i = image_weights[i,0] · image + image_weights[i,1] · n        0 ≤ i ≤ calls

A batch whose tables all look back fewer calls has a ring of fewer columns, for which `fold` lays coefficients out.

Rules: rows are calls, not steps (PNDM makes N + 1 calls in N steps, Heun 2N - 1); arrays are read-only; a table is
checked when it is created. This module knows neither diffusers nor torch.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

WINDOW = 4  # PNDM, LMS and IPNDM use the last four model outputs; no supported scheduler uses more
NUM_COLUMNS = 2 * WINDOW + 1  # columns of a table
NOISE_COLUMN = 2 * WINDOW

WINDOWS = (1, 2, WINDOW)
"""The windows that a history can have: powers of two, so that sums over it are added in the same order."""

NoiseDtype = Literal["model", "float32"]


def sample_column(call: int) -> int:
    """Column of the ring that holds x_call."""
    return call % WINDOW


def output_column(call: int) -> int:
    """Column of the ring that holds m_call."""
    return WINDOW + call % WINDOW


def num_columns(window: int) -> int:
    """Columns of a history with a ring of `window` calls."""
    return 2 * window + 1


def window_of(num_columns: int) -> int:
    """Return the window of a history with that many columns."""
    return num_columns // 2


def ring_window(window: int) -> int:
    """Return the smallest of `WINDOWS` that holds `window` calls."""
    return next(ring for ring in WINDOWS if ring >= window)


def fold(coefficients_NK: NDArray[np.float32], window: int) -> NDArray[np.float32]:
    """Lay out rows of tables that look back at most `window` calls for a ring of that many: [N, 2·window + 1].

    Exact: of the columns that share a place, at most one is not zero.
    """
    if window == WINDOW:
        return coefficients_NK
    rings = coefficients_NK[:, :NOISE_COLUMN].reshape(len(coefficients_NK), 2, WINDOW // window, window).sum(2)
    return np.concatenate([rings.reshape(len(rings), 2 * window), coefficients_NK[:, NOISE_COLUMN:]], axis=1)


@dataclass(frozen=True, eq=False)
class SamplerTable:
    """A scheduler at one number of steps. Created by `compile.compile_sampler`.

    Raises ValueError: an invariant does not hold; the message names it.
    """

    scheduler: str  # short name
    num_steps: int  # as requested
    timesteps: NDArray[np.float32]  # [calls]
    input_scale: NDArray[np.float32]  # [calls]
    coefficients: NDArray[np.float32]  # [calls, NUM_COLUMNS]
    noise: NDArray[np.bool_]  # [calls]: whether noise is drawn; with coefficient 0 it still advances the generator
    noise_dtype: NoiseDtype  # "model": the dtype of the model's output; "float32": always float32
    init_noise_sigma: float  # factor of the initial noise
    window: int  # the window of the fit, ≤ WINDOW
    residual: float  # largest error of the fit, relative to the sample it predicts
    image_weights: NDArray[np.float32] | None = None  # [calls + 1, 2]; None: it begins with noise

    def __post_init__(self) -> None:
        for array in (self.timesteps, self.input_scale, self.coefficients, self.noise, self.image_weights):
            if array is not None:
                array.setflags(write=False)
        problem = _problem(self)
        if problem:
            raise ValueError(f"table of {self.scheduler!r} with {self.num_steps} steps: {problem}")

    @property
    def num_calls(self) -> int:
        """Model calls per image; a guided call counts once."""
        return len(self.timesteps)

    def weighed_from(self, call: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return what call `call` and later ones weigh from before it: calls q of samples x_q, and of outputs m_q.

        The current sample is always among them, also where only the model's input depends on it.
        """
        samples, outputs = {call}, set[int]()
        for later in range(call, min(call + WINDOW, self.num_calls)):
            row = self.coefficients[later]
            for q in range(max(0, later - WINDOW + 1), call + 1):
                if row[sample_column(q)]:
                    samples.add(q)
                if q < call and row[output_column(q)]:
                    outputs.add(q)
        return tuple(sorted(samples)), tuple(sorted(outputs))


def concatenate_tables(first: SamplerTable, num_calls: int, second: SamplerTable) -> SamplerTable:
    """Return the first `num_calls` calls of one table, then those of a second one, which looks back at none of these.

    Both are of one scheduler. If `first` begins with an image, so does the result, but the weights of the image are
    known only up to where `second` begins.
    """
    turned = np.zeros_like(second.coefficients)  # its call 0 is call `num_calls` of the ring
    for start in (0, WINDOW):
        turned[:, start : start + WINDOW] = np.roll(second.coefficients[:, start : start + WINDOW], num_calls, axis=1)
    turned[:, NOISE_COLUMN] = second.coefficients[:, NOISE_COLUMN]
    weights_P2 = first.image_weights
    if weights_P2 is not None:
        weights_P2 = np.concatenate([weights_P2[: num_calls + 1], np.zeros((second.num_calls, 2), np.float32)])
    return SamplerTable(
        scheduler=first.scheduler,
        num_steps=first.num_steps,
        timesteps=np.concatenate([first.timesteps[:num_calls], second.timesteps]),
        input_scale=np.concatenate([first.input_scale[:num_calls], second.input_scale]),
        coefficients=np.concatenate([first.coefficients[:num_calls], turned]),
        noise=np.concatenate([first.noise[:num_calls], second.noise]),
        noise_dtype=first.noise_dtype if first.noise.any() else second.noise_dtype,
        init_noise_sigma=first.init_noise_sigma,
        window=max(first.window, second.window),
        residual=max(first.residual, second.residual),
        image_weights=weights_P2,
    )


def _problem(table: SamplerTable) -> str | None:
    """Return the first invariant that `table` violates, or None."""
    calls = table.num_calls
    per_call = (table.timesteps, table.input_scale, table.noise)
    if not calls or any(array.shape != (calls,) for array in per_call):
        return f"timesteps, input_scale and noise must have the same length, not {[a.shape for a in per_call]}"
    if table.coefficients.shape != (calls, NUM_COLUMNS):
        return f"coefficients must have shape {(calls, NUM_COLUMNS)}, not {table.coefficients.shape}"
    values = [table.timesteps, table.input_scale, table.coefficients]
    if table.image_weights is not None:
        values.append(table.image_weights)
        if (shape := table.image_weights.shape) != (calls + 1, 2):
            return f"image_weights must have shape {(calls + 1, 2)}, not {shape}"
    if not all(np.isfinite(array).all() for array in values):
        return "a value is infinite or not a number"
    if not (np.isfinite(table.init_noise_sigma) and table.init_noise_sigma > 0):
        return f"init_noise_sigma must be finite and > 0, not {table.init_noise_sigma}"
    if not 1 <= table.window <= WINDOW:
        return f"window must be 1 to {WINDOW}, not {table.window}"
    if table.coefficients[~table.noise, NOISE_COLUMN].any():
        return "a call without noise has a coefficient for noise"
    for call in range(min(calls, WINDOW - 1)):
        future_columns = [column for q in range(call + 1, WINDOW) for column in (sample_column(q), output_column(q))]
        if table.coefficients[call, future_columns].any():
            return f"call {call} has a coefficient for history from before the first call"
    return None
