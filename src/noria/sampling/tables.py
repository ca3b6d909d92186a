"""A compiled sampler: the numbers that carry one image from noise to its last latent, one row per model call.

Row i says: give the model `input_scale[i] · x_i` and `timesteps[i]`; with its output m_i and the draw n_i,

    x_{i+1} = Σ_k a[i,k]·x_{i-k} + Σ_k b[i,k]·m_{i-k} + c[i]·n_i        0 ≤ k < WINDOW

The history is a ring, so that a step never moves it. An image's column j of `coefficients` weighs place j of its history:

    j = 0 … WINDOW-1            the sample x_q         with q ≡ j (mod WINDOW)
    j = WINDOW … 2·WINDOW-1     the model's output m_q with q ≡ j (mod WINDOW)
    j = 2·WINDOW                the noise n_i

Rules: rows are calls, not steps (PNDM calls the model N + 1 times in N steps, Heun 2N - 1 times); arrays are read-only; a table is
checked when it is made. It knows neither diffusers nor torch.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

WINDOW = 4  # PNDM, LMS and IPNDM look back over four model outputs, and no scheduler that is served looks further
NUM_COLUMNS = 2 * WINDOW + 1
NOISE_COLUMN = 2 * WINDOW

NoiseDtype = Literal["model", "float32"]


def sample_column(call: int) -> int:
    """Where the ring holds x_call."""
    return call % WINDOW


def output_column(call: int) -> int:
    """Where the ring holds m_call."""
    return WINDOW + call % WINDOW


@dataclass(frozen=True, eq=False)
class SamplerTable:
    """One scheduler at one number of steps, filled by `compile.compile_sampler`.

    Raises `ValueError` when an invariant does not hold; the message names it.
    """

    scheduler: str  # short name
    num_steps: int  # what the caller asked for
    timesteps: NDArray[np.float32]  # [calls]
    input_scale: NDArray[np.float32]  # [calls]
    coefficients: NDArray[np.float32]  # [calls, NUM_COLUMNS]
    noise: NDArray[np.bool_]  # [calls]: whether a draw is made; with coefficient 0 it still moves the generator on
    noise_dtype: NoiseDtype  # "model": drawn in the dtype of the model's output; "float32": whatever the model's dtype
    init_noise_sigma: float  # the initial noise is multiplied by it
    window: int  # of the fit, ≤ WINDOW
    residual: float  # worst error of the fit, relative to the sample it predicts

    def __post_init__(self) -> None:
        for array in (self.timesteps, self.input_scale, self.coefficients, self.noise):
            array.setflags(write=False)
        problem = _problem(self)
        if problem:
            raise ValueError(f"table of {self.scheduler!r} with {self.num_steps} steps: {problem}")

    @property
    def num_calls(self) -> int:
        """How often the model is called, guidance aside."""
        return len(self.timesteps)


def _problem(table: SamplerTable) -> str | None:
    """The first invariant that `table` breaks."""
    calls = table.num_calls
    per_call = (table.timesteps, table.input_scale, table.noise)
    if not calls or any(array.shape != (calls,) for array in per_call):
        return f"timesteps, input_scale and noise must have one and the same length, not {[a.shape for a in per_call]}"
    if table.coefficients.shape != (calls, NUM_COLUMNS):
        return f"coefficients must have shape {(calls, NUM_COLUMNS)}, not {table.coefficients.shape}"
    if any(not np.isfinite(array).all() for array in (table.timesteps, table.input_scale, table.coefficients)):
        return "a number is infinite or not a number"
    if not (np.isfinite(table.init_noise_sigma) and table.init_noise_sigma > 0):
        return f"init_noise_sigma must be finite and > 0, not {table.init_noise_sigma}"
    if not 1 <= table.window <= WINDOW:
        return f"window must be 1 to {WINDOW}, not {table.window}"
    if table.coefficients[~table.noise, NOISE_COLUMN].any():
        return "a call that draws no noise weighs it"
    for call in range(min(calls, WINDOW - 1)):
        to_come = [column for q in range(call + 1, WINDOW) for column in (sample_column(q), output_column(q))]
        if table.coefficients[call, to_come].any():
            return f"call {call} weighs history from before the first call"
    return None
