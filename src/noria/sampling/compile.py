"""Compiles diffusers' schedulers to tables, without reimplementing any.

`probe.py` runs the scheduler once and returns the coefficients of all samples; the recurrence of `tables.py` is fitted
to them. A scheduler that a table cannot represent is rejected by name, never approximated.
"""

import threading
from collections import OrderedDict
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from noria.errors import InvalidField
from noria.images import scheduler_names
from noria.images.scheduler_names import SchedulerChoice
from noria.sampling.probe import MIN_DENOMINATOR, Array, SchedulerSetup, Trace, probe, unusable
from noria.sampling.schedule import DEFAULT_SCHEDULE, Schedule
from noria.sampling.tables import NOISE_COLUMN, NUM_COLUMNS, WINDOW, SamplerTable, output_column, sample_column

# Schedulers that compute in float32 fit to 1e-7, others to 1e-14: below this no better fit is searched.
_EXACT_RESIDUAL = 2e-7
# All tables of one model take 41 MB with the default `max_steps` of 200, and 790 MB with 1000.
_MAX_CACHE_BYTES = 128 * 2**20
_ENTRY_BYTES = 2000  # size of a table without its arrays, or of a rejection
_TIME_BYTES = 32  # size of a number in the tuples of a key's schedule
_FIT_TOLERANCE = 1e-6  # too short a recurrence is off by 1e-3 at 20 steps, but by little more than this at hundreds


def compile_sampler(
    choice: SchedulerChoice | str,
    model_config: Mapping[str, object],
    num_steps: int,
    schedule: Schedule = DEFAULT_SCHEDULE,
    first_step: int | None = None,
    num_calls: int | None = None,
) -> SamplerTable:
    """Compile `choice` for a model whose scheduler_config.json is `model_config`; cached.

    `schedule` is what the model's pipeline says of the steps' times; `first_step` < `num_steps` is where a sampler
    begins that is given an image. `num_calls`: so many calls are made, and the others skipped, as `skipped_calls.py`
    says; None: all.

    Raises InvalidField: field "scheduler": the scheduler cannot be used with this model, or cannot begin with an image;
    field "inference_steps": it cannot make that many steps, with diffusers' reason; field "calls": some are to be
    skipped, and it draws noise.
    """
    if isinstance(choice, str):
        choice = scheduler_names.find(choice)
    if first_step is not None:
        _check_start_image(choice.name, model_config)
    key = (SchedulerSetup.of(choice, model_config), num_steps, schedule, first_step, num_calls)
    compiled = _cache.get(key)
    if compiled is None:
        compiled = _compile_in_thread(key)
        _cache.put(key, compiled)
    if isinstance(compiled, InvalidField):
        raise InvalidField(compiled.message, field=compiled.field) from compiled
    return compiled


def is_compiled(
    scheduler: str,
    model_config: Mapping[str, object],
    num_steps: int,
    schedule: Schedule = DEFAULT_SCHEDULE,
    first_step: int | None = None,
    num_calls: int | None = None,
) -> bool:
    """Whether `compile_sampler` would return or raise at once; the answer is held until a cache's worth is compiled."""
    try:
        choice = scheduler_names.find(scheduler)
        if first_step is not None:
            _check_start_image(choice.name, model_config)
    except InvalidField:
        return True
    return _cache.get((SchedulerSetup.of(choice, model_config), num_steps, schedule, first_step, num_calls)) is not None


def _check_start_image(scheduler: str, model_config: Mapping[str, object]) -> None:
    family = scheduler_names.family_of(model_config)
    scheduler_names.check_start_image(scheduler, (each.name for each in scheduler_names.choices_of_family(family)))


_Key = tuple[SchedulerSetup, int, Schedule, int | None, int | None]


class _Cache:
    """Tables, and rejections, which take as long; drops the least recently used ones beyond `max_bytes`."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._entries: OrderedDict[_Key, SamplerTable | InvalidField] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: _Key) -> SamplerTable | InvalidField | None:
        """Return the entry, which becomes the most recently used one, or None."""
        with self._lock:
            if key in self._entries:
                self._entries.move_to_end(key)
            return self._entries.get(key)

    def put(self, key: _Key, entry: SamplerTable | InvalidField) -> None:
        """Add an entry, unless another thread has added it."""
        with self._lock:
            if key in self._entries:
                return
            self._entries[key] = entry
            self._num_bytes += _size_bytes(key, entry)
            while self._num_bytes > self._max_bytes:
                self._num_bytes -= _size_bytes(*self._entries.popitem(last=False))


_cache = _Cache(_MAX_CACHE_BYTES)


def _size_bytes(key: _Key, entry: SamplerTable | InvalidField) -> int:
    schedule = key[2]
    num_bytes = _ENTRY_BYTES + _TIME_BYTES * (len(schedule.sigmas or ()) + len(schedule.timesteps or ()))
    if isinstance(entry, InvalidField):
        return num_bytes
    arrays = (entry.timesteps, entry.input_scale, entry.coefficients, entry.noise, entry.image_weights)
    return num_bytes + sum(array.nbytes for array in arrays if array is not None)


def _compile_in_thread(key: _Key) -> SamplerTable | InvalidField:
    # In a thread that ends: torch's OpenMP gives every computing thread its own pool, and while two pools exist,
    # libgomp's threads sleep between operations. A long-lived compiling thread would halve the speed of the engine
    # loop's thread.
    with ThreadPoolExecutor(1) as executor:
        try:
            return executor.submit(_compile, key).result()
        except InvalidField as rejection:
            return rejection


def _compile(key: _Key) -> SamplerTable:
    setup, num_steps, *_ = key
    return _fit_table(setup.name, num_steps, probe(*key))


def _fit_table(name: str, num_steps: int, trace: Trace) -> SamplerTable:
    """Fit the narrowest window that explains every call."""
    input_scale = _input_scale(name, trace)
    best = None
    for window in range(1, WINDOW + 1):
        fit = _fit(trace, window)
        if fit is not None and (best is None or fit.residual < best.residual):
            best = fit
        if best is not None and best.residual <= _EXACT_RESIDUAL:
            break
    if best is None:
        raise unusable(name, f"a step looks back further than {WINDOW} model calls")
    return SamplerTable(
        scheduler=name,
        num_steps=num_steps,
        timesteps=trace.timesteps_N,
        input_scale=input_scale,
        coefficients=best.coefficients.astype(np.float32),
        noise=trace.noise_N,
        noise_dtype=trace.noise_dtype,
        init_noise_sigma=trace.init_noise_sigma,
        window=best.window,
        residual=best.residual,
        image_weights=None if trace.image_weights_P2 is None else trace.image_weights_P2.astype(np.float32),
    )


def _input_scale(name: str, trace: Trace) -> NDArray[np.float32]:
    """Return s[i], where the model's input at call i is s[i]·x_i."""
    samples_NK = trace.samples_PK[:-1]
    scale_N = (trace.inputs_NK * samples_NK).sum(1) / (samples_NK**2).sum(1)
    error_N = np.abs(trace.inputs_NK - scale_N[:, None] * samples_NK).max(1) / np.abs(samples_NK).max(1)
    if error_N.max() > _FIT_TOLERANCE:
        raise unusable(name, "the model's input is not a multiple of the sample")
    scale_N32: NDArray[np.float32] = scale_N.astype(np.float32)
    return scale_N32


@dataclass(frozen=True)
class _Fit:
    """A recurrence over `window` calls and its largest residual."""

    window: int
    coefficients: Array  # [N, NUM_COLUMNS]
    residual: float


def _fit(trace: Trace, window: int) -> _Fit | None:
    """Fit the recurrence over `window` calls; None if it does not explain one of them."""
    calls = len(trace.timesteps_N)
    coefficients = np.zeros((calls, NUM_COLUMNS))
    worst = 0.0
    for call in range(calls):
        # Outputs and noise within the window have free coefficients, so the samples need to explain only the rest.
        outputs = range(max(0, call - window + 1), call + 1)
        free = [1 + q for q in outputs] + [1 + calls + call]
        rest = np.append(np.arange(1 + outputs[0]), 1 + calls + np.flatnonzero(trace.noise_N[:call]))
        weights, residual = _fewest_samples(trace.samples_PK, call, window, rest)
        if residual > _FIT_TOLERANCE:
            return None
        worst = max(worst, residual)
        past = range(call, call - len(weights), -1)
        left_over = trace.samples_PK[call + 1, free] - weights @ trace.samples_PK[past][:, free]
        coefficients[call, [sample_column(q) for q in past]] = weights
        coefficients[call, [output_column(q) for q in outputs]] = left_over[:-1]
        coefficients[call, NOISE_COLUMN] = left_over[-1] if trace.noise_N[call] else 0.0
    return _Fit(window, coefficients, worst)


def _fewest_samples(samples_PK: Array, call: int, window: int, rest: NDArray[np.int_]) -> tuple[Array, float]:
    """Return weights of x_call, x_{call-1}, … that yield x_{call+1} in the channels `rest`, and the relative residual.

    Uses as few samples as possible: neighbouring ones are nearly parallel, and weights that cancel would lose precision
    in float32.
    """
    target = samples_PK[call + 1, rest]
    size = np.abs(samples_PK[call + 1]).max() + MIN_DENOMINATOR
    best, min_residual = np.zeros(0), np.inf
    for num_samples in range(1, min(window, call + 1) + 1):
        columns = samples_PK[range(call, call - num_samples, -1)][:, rest].T
        weights = np.linalg.lstsq(columns, target, rcond=None)[0]
        residual = float(np.abs(columns @ weights - target).max() / size)
        if residual < min_residual:
            best, min_residual = weights, residual
        if min_residual <= _EXACT_RESIDUAL:
            break
    return best, min_residual
