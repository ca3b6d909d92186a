"""Compiles diffusers' schedulers to tables, without reimplementing any.

A scheduler that is linear in the sample, the model's outputs and the noise is determined by its results on basis
vectors. So the scheduler of diffusers runs once, in float64, on a sample of many channels:

    channel 0               1 in the start x_T
    channel 1 + i           1 in the model's output m_i
    channel 1 + calls + i   1 in the noise n_i
    the last few            large random numbers in all of these: the witnesses

After every call the sample *is* the vector of its coefficients, and the recurrence of `tables.py` is fitted to these
vectors. The witnesses reveal a scheduler that is not linear (it clips, or thresholds): then they are not the same
combination.

Rules: settings that diffusers' Stable Diffusion pipeline forces on a scheduler (no clipping, steps_offset 1) are forced
here too; a scheduler that a table cannot represent is refused by name, never approximated. During compilation the
`randn_tensor` of the scheduler's module is replaced, under a lock of this module: that is safe in all threads of Noria,
but not beside another thread that runs diffusers' own samplers in the same process. This module does not know models,
requests or devices.
"""

import contextlib
import copy
import functools
import importlib
import inspect
import json
import threading
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from noria.errors import InvalidField
from noria.images import scheduler_names
from noria.images.scheduler_names import SchedulerChoice
from noria.sampling.tables import (
    NOISE_COLUMN,
    NUM_COLUMNS,
    WINDOW,
    NoiseDtype,
    SamplerTable,
    output_column,
    sample_column,
)

Array = NDArray[np.float64]

MAX_STEPS = 1000  # num_train_timesteps of all known models; the probe's memory grows with its square
# Schedulers that compute in float32 fit to 1e-7, others to 1e-14: below this no better fit is searched.
_EXACT_RESIDUAL = 2e-7
_FIT_TOLERANCE = 1e-6  # too short a recurrence is off by 1e-3 at 20 steps, but by little more than this at hundreds
_WITNESS_TOLERANCE = 1e-5  # float32 arithmetic leaves about 1e-7 of the largest term; clipping leaves about 1
_MIN_DENOMINATOR = 1e-300  # IPNDM with one step yields exactly 0, whatever the model's output
_NUM_WITNESSES = 4
_WITNESS_AMPLITUDE = 64.0  # far outside any clip range, also where the prediction of x_0 scales its input down

# One scheduler at a time: its module's randn_tensor, diffusers' verbosity and Python's warning filters are global to
# the process.
_lock = threading.Lock()


def compile_sampler(
    choice: SchedulerChoice | str, model_config: Mapping[str, object], num_steps: int, *, mu: float | None = None
) -> SamplerTable:
    """Compile `choice` for a model whose scheduler_config.json is `model_config`; cached.

    `mu` is the shift of a flow schedule that depends on the image's size (`use_dynamic_shifting`), None for others.

    Raises:
        InvalidField: field "scheduler": the scheduler cannot be used with this model; field "inference_steps": it
            cannot make that many steps, with diffusers' reason.

    """
    if isinstance(choice, str):
        choice = scheduler_names.find(choice)
    overrides, config = (json.dumps(dict(given), sort_keys=True) for given in (choice.overrides, model_config))
    compiled = _compile_cached(choice.name, choice.diffusers_class, choice.family, overrides, config, num_steps, mu)
    if isinstance(compiled, InvalidField):
        raise InvalidField(compiled.message, field=compiled.field) from compiled
    return compiled


# A table of 50 steps takes 2 kB; 512 tables cover all schedulers and step counts of a day of real traffic.
@functools.lru_cache(maxsize=512)
def _compile_cached(
    name: str,
    class_name: str,
    family: scheduler_names.Family,
    overrides: str,
    config: str,
    num_steps: int,
    mu: float | None,
) -> SamplerTable | InvalidField:
    """Return the table, or the refusal, which takes as long to compute and is requested as often."""
    # In a thread that ends: torch's OpenMP gives every computing thread its own pool, and while two pools exist,
    # libgomp's threads sleep between operations. A long-lived compiling thread would halve the speed of the engine
    # loop's thread.
    with ThreadPoolExecutor(1) as executor:
        try:
            return executor.submit(_compile, name, class_name, family, overrides, config, num_steps, mu).result()
        except InvalidField as refusal:
            return refusal


def _compile(
    name: str,
    class_name: str,
    family: scheduler_names.Family,
    overrides: str,
    config: str,
    num_steps: int,
    mu: float | None,
) -> SamplerTable:
    if not 1 <= num_steps <= MAX_STEPS:
        raise InvalidField(f"inference_steps must be from 1 to {MAX_STEPS}, got {num_steps}.", field="inference_steps")
    _check_family(name, family, json.loads(config))
    with _lock, _silence_diffusers():
        scheduler = copy.deepcopy(_make_scheduler(name, class_name, family, overrides, config))
        try:
            _set_timesteps(name, scheduler, num_steps, mu)
            trace = _probe(name, scheduler)
        except InvalidField:
            raise
        except Exception as error:
            raise _bad_steps(name, num_steps, f"diffusers says {type(error).__name__}: {error}") from error
    if not trace.is_finite:
        raise _bad_steps(name, num_steps, "its values are infinite or not a number")
    _check_linear(name, trace)
    return _fit_table(name, num_steps, trace)


def _check_family(name: str, family: scheduler_names.Family, model_config: Mapping[str, object]) -> None:
    wanted = scheduler_names.family_of(model_config)
    if family != wanted:
        known = ", ".join(choice.name for choice in scheduler_names.choices_of_family(wanted))
        raise _refused(name, f"it samples {family} models, but this is a {wanted} model; its schedulers are {known}")


def _refused(name: str, reason: str) -> InvalidField:
    return InvalidField(f"scheduler {name!r} cannot be used: {reason}.", field="scheduler")


def _bad_steps(name: str, num_steps: int, reason: str) -> InvalidField:
    message = f"scheduler {name!r} cannot make {num_steps} inference_steps for this model: {reason}"
    return InvalidField(message, field="inference_steps")


# --- the scheduler of diffusers ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def _silence_diffusers() -> Iterator[None]:
    """Suppress diffusers' logs and warnings: they are about the model's configuration, which clients cannot change."""
    log = importlib.import_module("diffusers.utils.logging")
    verbosity = log.get_verbosity()
    log.set_verbosity(log.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.set_verbosity(verbosity)


# Copied before use, never stepped: constructing KDPM2 runs through 1000 steps, which takes half a second.
@functools.lru_cache(maxsize=64)
def _make_scheduler(name: str, class_name: str, family: scheduler_names.Family, overrides: str, config: str) -> Any:
    """Construct the scheduler as diffusers' pipeline for this family does."""
    model_config = json.loads(config)
    scheduler_class = getattr(importlib.import_module("diffusers.schedulers"), class_name)
    known = inspect.signature(scheduler_class).parameters
    if "thresholding" in known and model_config.get("thresholding"):
        raise _refused(name, "the model's configuration enables thresholding, which is not linear")
    forced: dict[str, object] = {}
    if family == "diffusion":
        forced = {"clip_sample": False, "steps_offset": 1}
    if family == "flow" and "shift" in model_config:
        forced = {"flow_shift": model_config["shift"]}  # one setting, which FlowMatch* and the others name differently
    settings = {key: value for key, value in forced.items() if key in known} | json.loads(overrides)
    try:
        return scheduler_class.from_config(model_config, **settings)
    except Exception as error:
        raise _refused(
            name, f"diffusers cannot construct it for this model ({type(error).__name__}: {error})"
        ) from error


def _set_timesteps(name: str, scheduler: Any, num_steps: int, mu: float | None) -> None:
    if mu is None:
        scheduler.set_timesteps(num_steps)
        return
    if "mu" not in inspect.signature(scheduler.set_timesteps).parameters:
        raise _refused(name, "it cannot shift its schedule with the image's size, as this model requires")
    scheduler.set_timesteps(num_steps, mu=mu)


# --- the probe --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Trace:
    """The result of one run on basis vectors.

    P = calls + 1 samples, N = calls, K = 1 + 2·calls basis vectors, W witnesses.
    """

    timesteps_N: NDArray[np.float32]
    init_noise_sigma: float
    samples_PK: Array  # samples_PK[i] is x_i
    samples_PW: Array  # the witnesses of each sample
    inputs_NK: Array  # after scale_model_input
    witnesses_KW: Array  # the witnesses' values of each basis vector
    noise_N: NDArray[np.bool_]
    noise_dtype: NoiseDtype

    @property
    def is_finite(self) -> bool:
        """Whether all values are finite."""
        arrays = (self.samples_PK, self.samples_PW, self.inputs_NK, self.timesteps_N)
        return all(bool(np.isfinite(array).all()) for array in arrays)


class _NoiseRecorder:
    """Replaces `randn_tensor`: returns the basis vector of the call's noise and records the draw and its dtype."""

    def __init__(self, name: str, noise_1NC11: torch.Tensor) -> None:
        self._name = name
        self._noise_1NC11 = noise_1NC11
        self.call = 0
        self.drawn = np.zeros(noise_1NC11.shape[1], dtype=bool)
        self.dtypes: set[NoiseDtype] = set()

    def __call__(self, shape: object, *_: object, dtype: torch.dtype | None = None, **__: object) -> torch.Tensor:
        noise = self._noise_1NC11[:, self.call]
        if self.drawn[self.call] or tuple(noise.shape) != tuple(torch.Size(shape)):  # type: ignore[arg-type]
            raise _refused(self._name, "it draws more noise in a call than one tensor of the sample's shape")
        self.drawn[self.call] = True
        self.dtypes.add("model" if dtype == torch.float64 else "float32")  # the probe's model outputs are float64
        return noise.to(dtype or torch.float32)


def pipeline_options(scheduler: Any, generator: torch.Generator) -> dict[str, object]:
    """Return the options that StableDiffusionPipeline passes to `scheduler.step`, if the scheduler accepts them.

    The pipeline's default of `eta` is 0, also for schedulers with another default (TCD's is 0.3).
    """
    accepted = inspect.signature(scheduler.step).parameters
    return {key: value for key, value in {"eta": 0.0, "generator": generator}.items() if key in accepted}


def _probe(name: str, scheduler: Any) -> _Trace:
    """Run `scheduler`, whose timesteps are set, on the basis vectors and the witnesses."""
    calls = len(scheduler.timesteps)
    num_basis = 1 + 2 * calls
    witnesses_KW = _WITNESS_AMPLITUDE * np.random.default_rng(0).standard_normal((num_basis, _NUM_WITNESSES))
    given = torch.from_numpy(np.concatenate([np.eye(num_basis), witnesses_KW], axis=1))[None, :, :, None, None]
    noise_recorder = _NoiseRecorder(name, given[:, 1 + calls :])
    untouched = torch.Generator()
    state = untouched.get_state()
    options = pipeline_options(scheduler, untouched)
    scale = getattr(scheduler, "scale_model_input", None)

    sample = given[:, 0]
    samples, inputs = [_vector(sample)], []
    with _replace_randn(importlib.import_module(type(scheduler).__module__), noise_recorder):
        for call, timestep in enumerate(scheduler.timesteps):
            noise_recorder.call = call
            inputs.append(_vector(scale(sample, timestep) if scale else sample)[:num_basis])
            sample = scheduler.step(given[:, 1 + call], timestep, sample, return_dict=False, **options)[0].double()
            samples.append(_vector(sample))
    if not torch.equal(state, untouched.get_state()):
        raise _refused(name, "it draws random numbers without diffusers' randn_tensor")
    if len(noise_recorder.dtypes) > 1:
        raise _refused(name, "it draws noise in more than one dtype")
    all_samples = np.stack(samples)
    return _Trace(
        timesteps_N=scheduler.timesteps.numpy().astype(np.float32),
        init_noise_sigma=float(getattr(scheduler, "init_noise_sigma", 1.0)),
        samples_PK=all_samples[:, :num_basis],
        samples_PW=all_samples[:, num_basis:],
        inputs_NK=np.stack(inputs),
        witnesses_KW=witnesses_KW,
        noise_N=noise_recorder.drawn,
        noise_dtype=noise_recorder.dtypes.pop() if noise_recorder.dtypes else "model",
    )


def _vector(sample_1C11: torch.Tensor) -> Array:
    """Copy the channels: some schedulers modify the sample that they returned before."""
    return sample_1C11[0, :, 0, 0].double().numpy().copy()


@contextlib.contextmanager
def _replace_randn(module: ModuleType, noise_recorder: _NoiseRecorder) -> Iterator[None]:
    """Replace `module.randn_tensor`.

    If a module without it draws noise, `_probe` detects that its generator advanced.
    """
    real = getattr(module, "randn_tensor", None)
    if real is None:
        yield
        return
    module.randn_tensor = noise_recorder  # type: ignore[attr-defined]
    try:
        yield
    finally:
        module.randn_tensor = real  # type: ignore[attr-defined]


# --- from vectors to the table ----------------------------------------------------------------------------------------


def _check_linear(name: str, trace: _Trace) -> None:
    """Check that the scheduler combines the witnesses as it combines the basis vectors; only a linear one does."""
    expected_PW = trace.samples_PK @ trace.witnesses_KW
    size_PW = np.abs(trace.samples_PK) @ np.abs(trace.witnesses_KW) + _MIN_DENOMINATOR
    error = float((np.abs(trace.samples_PW - expected_PW) / size_PW).max())
    if error > _WITNESS_TOLERANCE:
        raise _refused(name, f"it is not linear in the sample (off by {error:.1e}): it clips, thresholds or normalises")


def _fit_table(name: str, num_steps: int, trace: _Trace) -> SamplerTable:
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
        raise _refused(name, f"a step looks back further than {WINDOW} model calls")
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
    )


def _input_scale(name: str, trace: _Trace) -> NDArray[np.float32]:
    """Return s[i], where the model's input at call i is s[i]·x_i."""
    samples_NK = trace.samples_PK[:-1]
    scale_N = (trace.inputs_NK * samples_NK).sum(1) / (samples_NK**2).sum(1)
    error_N = np.abs(trace.inputs_NK - scale_N[:, None] * samples_NK).max(1) / np.abs(samples_NK).max(1)
    if error_N.max() > _FIT_TOLERANCE:
        raise _refused(name, "the model's input is not a multiple of the sample")
    scale_N32: NDArray[np.float32] = scale_N.astype(np.float32)
    return scale_N32


@dataclass(frozen=True)
class _Fit:
    """A recurrence over `window` calls and its largest residual."""

    window: int
    coefficients: Array  # [N, NUM_COLUMNS]
    residual: float


def _fit(trace: _Trace, window: int) -> _Fit | None:
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
    size = np.abs(samples_PK[call + 1]).max() + _MIN_DENOMINATOR
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
