"""Runs a scheduler of diffusers on basis vectors. If it is linear, the samples are its coefficients.

A scheduler that is linear in the sample, the model's outputs and the noise is determined by its results on basis
vectors. So the scheduler of diffusers runs once, in float64, on a sample of many channels:

    channel 0               1 in the start x_T
    channel 1 + i           1 in the model's output m_i
    channel 1 + calls + i   1 in the noise n_i
    the last few            large random numbers in all of these: the witnesses

After every call the sample *is* the vector of its coefficients. A skipped call (`skipped_calls.py`) has no channel of
its own: its output is a combination of those before it. A sampler that begins with an image, or with another model's
latents, makes the last of the calls, from `first_step` or below a timestep; the scheduler keeps all of its timesteps,
as in the pipelines, because some schedulers look at their neighbours. The witnesses reveal a scheduler that is not
linear (it clips, or thresholds): then they are not the same combination.

Clipping, which is not linear, is always off, as diffusers' Stable Diffusion pipeline has it. During a probe the
`randn_tensor` of the scheduler's module is replaced, under a lock of this module: that is safe in all threads of Noria,
but not beside another thread that runs diffusers' own samplers in the same process. This module does not know models,
requests or devices, nor how a table is made of a trace.
"""

import contextlib
import copy
import functools
import importlib
import inspect
import json
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from noria.errors import InvalidField
from noria.images import scheduler_names
from noria.images.scheduler_names import SchedulerChoice
from noria.sampling.schedule import DEFAULT_SCHEDULE, Schedule
from noria.sampling.skipped_calls import evenly_spread, extrapolation_weight
from noria.sampling.tables import NoiseDtype

Array = NDArray[np.float64]

MAX_STEPS = 1000  # num_train_timesteps of all known models; the probe's memory grows with its square
MIN_DENOMINATOR = 1e-300  # IPNDM with one step yields exactly 0, whatever the model's output
_WITNESS_TOLERANCE = 1e-5  # float32 arithmetic leaves about 1e-7 of the largest term; clipping leaves about 1
_NUM_WITNESSES = 4
_WITNESS_AMPLITUDE = 64.0  # far outside any clip range, also where the prediction of x_0 scales its input down

# One scheduler at a time: its module's randn_tensor, diffusers' verbosity and Python's warning filters are global to
# the process.
_lock = threading.Lock()


@dataclass(frozen=True)
class SchedulerSetup:
    """A scheduler as diffusers' pipeline of a model would construct it. Hashable: equal ones sample alike."""

    name: str  # Noria's, for error messages
    class_name: str
    family: scheduler_names.Family
    overrides: str  # JSON
    model_config: str  # JSON: the model's scheduler_config.json

    @classmethod
    def of(cls, choice: SchedulerChoice, model_config: Mapping[str, object]) -> "SchedulerSetup":
        """Return `choice` for a model whose scheduler_config.json is `model_config`."""
        overrides, config = (json.dumps(dict(given), sort_keys=True) for given in (choice.overrides, model_config))
        return cls(choice.name, choice.diffusers_class, choice.family, overrides, config)


@dataclass(frozen=True)
class Trace:
    """The coefficients of every sample in one run of a linear scheduler.

    P = calls + 1 samples, N = calls that are made, K = 1 + 2·calls basis vectors.
    """

    timesteps_N: NDArray[np.float32]
    init_noise_sigma: float
    samples_PK: Array  # samples_PK[i] is x_i
    inputs_NK: Array  # after scale_model_input
    noise_N: NDArray[np.bool_]  # the calls that draw noise
    noise_dtype: NoiseDtype
    image_weights_P2: (
        Array | None
    )  # weights of an image and of noise, as the scheduler adds it before x_i; the last are 1 and 0


def probe(
    setup: SchedulerSetup,
    num_steps: int,
    schedule: Schedule = DEFAULT_SCHEDULE,
    first_step: int | None = None,
    num_calls: int | None = None,
) -> Trace:
    """Run the scheduler with `num_steps` of `schedule` on the basis vectors; with an image, from `first_step` on.

    `num_calls`: so many of the calls are made, the others skipped; None: all are made.

    Raises InvalidField: field "scheduler": the scheduler cannot be used with this model, or is not linear; field
    "inference_steps": it cannot make that many steps, with diffusers' reason; field "calls": some are to be skipped,
    and it draws noise.
    """
    if not 1 <= num_steps <= MAX_STEPS:
        raise InvalidField(f"inference_steps must be from 1 to {MAX_STEPS}, got {num_steps}.", field="inference_steps")
    _check_family(setup)
    with _lock, _silence_diffusers():
        scheduler = copy.deepcopy(_make_scheduler(setup))
        try:
            _set_timesteps(setup.name, scheduler, num_steps, schedule)
            timesteps = scheduler.timesteps
            if schedule.begins_below is not None:
                timesteps = _begin_below(scheduler, num_steps, schedule.begins_below)
            elif first_step is not None:
                timesteps = _begin(scheduler, first_step * scheduler.order)
            made = range(len(timesteps)) if num_calls is None else evenly_spread(len(timesteps), num_calls)
            trace, witnesses = _run(setup.name, scheduler, timesteps, made, begins_with_image=first_step is not None)
        except InvalidField:
            raise
        except Exception as error:
            raise _bad_steps(setup.name, num_steps, f"diffusers says {type(error).__name__}: {error}") from error
    arrays = (trace.samples_PK, witnesses.samples_PW, trace.inputs_NK, trace.timesteps_N, trace.image_weights_P2)
    if not all(bool(np.isfinite(array).all()) for array in arrays if array is not None):
        raise _bad_steps(setup.name, num_steps, "its values are infinite or not a number")
    _check_linear(setup.name, trace, witnesses)
    return trace


def unusable(name: str, reason: str) -> InvalidField:
    """Return the error for a scheduler that cannot be compiled for a model."""
    return InvalidField(f"scheduler {name!r} cannot be used: {reason}.", field="scheduler")


def _bad_steps(name: str, num_steps: int, reason: str) -> InvalidField:
    message = f"scheduler {name!r} cannot make {num_steps} inference_steps for this model: {reason}"
    return InvalidField(message, field="inference_steps")


# ── The scheduler of diffusers ────────────────────────────────────────────────────────────────────────────────────────


def _check_family(setup: SchedulerSetup) -> None:
    wanted = scheduler_names.family_of(json.loads(setup.model_config))
    if setup.family != wanted:
        known = ", ".join(choice.name for choice in scheduler_names.choices_of_family(wanted))
        raise unusable(
            setup.name, f"it samples {setup.family} models, but this is a {wanted} model; its schedulers are {known}"
        )


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
def _make_scheduler(setup: SchedulerSetup) -> Any:
    """Construct the scheduler as diffusers' pipeline for its family does."""
    model_config = json.loads(setup.model_config)
    scheduler_class = getattr(importlib.import_module("diffusers.schedulers"), setup.class_name)
    known = inspect.signature(scheduler_class).parameters
    if "thresholding" in known and model_config.get("thresholding"):
        raise unusable(setup.name, "the model's configuration enables thresholding, which is not linear")
    forced: dict[str, object] = {}
    if setup.family == "diffusion":
        forced = {"clip_sample": False}
    if setup.family == "flow":
        forced = _shift_of(model_config)
    settings = {key: value for key, value in forced.items() if key in known} | json.loads(setup.overrides)
    try:
        return scheduler_class.from_config(model_config, **settings)
    except Exception as error:
        raise unusable(
            setup.name, f"diffusers cannot construct it for this model ({type(error).__name__}: {error})"
        ) from error


def _shift_of(model_config: Mapping[str, object]) -> dict[str, object]:
    """Return the shift of a flow model under both of its names: FlowMatch* and the others name it differently."""
    names = ("shift", "flow_shift") if "FlowMatch" in str(model_config.get("_class_name")) else ("flow_shift", "shift")
    own = next((name for name in names if name in model_config), None)
    return {} if own is None else dict.fromkeys(names, model_config[own])


def _set_timesteps(name: str, scheduler: Any, num_steps: int, schedule: Schedule) -> None:
    if scheduler.config.get("use_flow_sigmas") and not schedule.gives_flow_sigmas:
        schedule = replace(schedule, sigmas=None)
    arguments, accepted = schedule.arguments(num_steps), inspect.signature(scheduler.set_timesteps).parameters
    for argument in arguments:
        if argument not in accepted:
            raise unusable(name, f"its schedule cannot be set by {argument}, as this model's pipeline sets it")
    scheduler.set_timesteps(**arguments)


# ── The run ───────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class _Witnesses:
    """W more channels of the same run."""

    values_KW: Array  # their values in each basis vector
    samples_PW: Array  # their values in each sample


class _NoiseRecorder:
    """Replaces `randn_tensor`: returns the basis vector of the call's noise and records the draw and its dtype."""

    def __init__(self, name: str, noise_1NC11: torch.Tensor, *, skips_calls: bool) -> None:
        self._name, self._skips_calls = name, skips_calls
        self._noise_1NC11 = noise_1NC11
        self.call = 0
        self.drawn = np.zeros(noise_1NC11.shape[1], dtype=bool)
        self.dtypes: set[NoiseDtype] = set()

    def __call__(self, shape: object, *_: object, dtype: torch.dtype | None = None, **__: object) -> torch.Tensor:
        if self._skips_calls:
            raise InvalidField(
                f"calls: scheduler {self._name!r} draws noise at its calls for this model, so none can be skipped. "
                "Leave calls out, or use another scheduler.",
                field="calls",
            )
        noise = self._noise_1NC11[:, self.call]
        if self.drawn[self.call] or tuple(noise.shape) != tuple(torch.Size(shape)):  # type: ignore[arg-type]
            raise unusable(self._name, "it draws more noise in a call than one tensor of the sample's shape")
        self.drawn[self.call] = True
        self.dtypes.add("model" if dtype == torch.float64 else "float32")  # the probe's model outputs are float64
        return noise.to(dtype or torch.float32)


def pipeline_options(scheduler: Any, generator: torch.Generator) -> dict[str, object]:
    """Return the options that StableDiffusionPipeline passes to `scheduler.step`, if the scheduler accepts them.

    The pipeline's default of `eta` is 0, also for schedulers with another default (TCD's is 0.3).
    """
    accepted = inspect.signature(scheduler.step).parameters
    return {key: value for key, value in {"eta": 0.0, "generator": generator}.items() if key in accepted}


def _run(
    name: str, scheduler: Any, timesteps: torch.Tensor, made: Sequence[int], *, begins_with_image: bool
) -> tuple[Trace, _Witnesses]:
    """Run `scheduler` at `timesteps`, all of its own or the last ones, on the basis vectors and the witnesses.

    The calls `made` have outputs of their own.
    """
    calls = len(made)
    num_basis = 1 + 2 * calls
    witnesses_KW = _WITNESS_AMPLITUDE * np.random.default_rng(0).standard_normal((num_basis, _NUM_WITNESSES))
    given = torch.from_numpy(np.concatenate([np.eye(num_basis), witnesses_KW], axis=1))[None, :, :, None, None]
    noise_recorder = _NoiseRecorder(name, given[:, 1 + calls :], skips_calls=calls < len(timesteps))
    untouched = torch.Generator()
    state = untouched.get_state()
    options = pipeline_options(scheduler, untouched)
    scale = getattr(scheduler, "scale_model_input", None)

    sample = given[:, 0]
    samples: list[Array] = []
    inputs, image_weights = [], []
    with _replace_randn(importlib.import_module(type(scheduler).__module__), noise_recorder):
        for call, timestep in enumerate(timesteps):
            # Also of a skipped call: some schedulers find their place here.
            scaled = scale(sample, timestep) if scale else sample
            if call in made:
                noise_recorder.call = len(samples)
                samples.append(_vector(sample))
                inputs.append(_vector(scaled)[:num_basis])
                if begins_with_image:
                    image_weights.append(_image_weights(scheduler, timestep))
                output = given[:, len(samples)]
            else:
                output = _extrapolate(given, call, made, len(samples))
            sample = scheduler.step(output, timestep, sample, return_dict=False, **options)[0].double()
    samples.append(_vector(sample))
    if not torch.equal(state, untouched.get_state()):
        raise unusable(name, "it draws random numbers without diffusers' randn_tensor")
    if len(noise_recorder.dtypes) > 1:
        raise unusable(name, "it draws noise in more than one dtype")
    all_samples = np.stack(samples)
    trace = Trace(
        timesteps_N=timesteps[list(made)].numpy().astype(np.float32),
        init_noise_sigma=float(getattr(scheduler, "init_noise_sigma", 1.0)),
        samples_PK=all_samples[:, :num_basis],
        inputs_NK=np.stack(inputs),
        noise_N=noise_recorder.drawn,
        noise_dtype=noise_recorder.dtypes.pop() if noise_recorder.dtypes else "model",
        image_weights_P2=np.array([*image_weights, [1.0, 0.0]]) if image_weights else None,
    )
    return trace, _Witnesses(witnesses_KW, all_samples[:, num_basis:])


def _extrapolate(given: torch.Tensor, call: int, made: Sequence[int], num_before: int) -> torch.Tensor:
    """Return a skipped call's output from those of the calls made before it, which `given` has from channel 1 on."""
    if num_before == 1:
        return given[:, 1]
    weight = extrapolation_weight(call, made, num_before)
    return (1 + weight) * given[:, num_before] - weight * given[:, num_before - 1]


def _begin_below(scheduler: Any, num_steps: int, timestep: int) -> torch.Tensor:
    """Have the scheduler begin below a timestep, as `get_timesteps` of the pipelines; return the timesteps left.

    One of order 2 is not begun with the second call of a step, but with the call before it, which is repeated.
    """
    calls_left = int((scheduler.timesteps < timestep).sum())
    if not calls_left:
        raise InvalidField(
            f"refiner: it would begin below timestep {timestep} of {scheduler.config.num_train_timesteps}, but the "
            f"last of {num_steps} inference_steps is at {float(scheduler.timesteps[-1]):g}. Use a smaller start, or "
            "more steps.",
            field="refiner",
        )
    if scheduler.order == 2 and calls_left % 2 == 0:
        calls_left += 1
    return _begin(scheduler, len(scheduler.timesteps) - calls_left)


def _begin(scheduler: Any, first_call: int) -> torch.Tensor:
    """Have the scheduler begin with `first_call`, as `get_timesteps` of the pipelines; return the timesteps left."""
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(first_call)
    left: torch.Tensor = scheduler.timesteps[first_call:]
    return left


def _image_weights(scheduler: Any, timestep: torch.Tensor) -> Array:
    """Return the weights of an image and of noise before the next call, which is at `timestep`."""
    image, noise = torch.eye(2, dtype=torch.float64)[:, None, :, None, None]
    if hasattr(scheduler, "add_noise"):
        return _vector(scheduler.add_noise(image, noise, timestep[None]))
    return _vector(scheduler.scale_noise(image, timestep[None], noise))


def _vector(sample_1C11: torch.Tensor) -> Array:
    """Copy the channels: some schedulers modify the sample that they returned before."""
    return sample_1C11[0, :, 0, 0].double().numpy().copy()


@contextlib.contextmanager
def _replace_randn(module: ModuleType, noise_recorder: _NoiseRecorder) -> Iterator[None]:
    """Replace `module.randn_tensor`.

    If a module without it draws noise, `_run` detects that its generator advanced.
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


def _check_linear(name: str, trace: Trace, witnesses: _Witnesses) -> None:
    """Check that the scheduler combines the witnesses as it combines the basis vectors; only a linear one does."""
    expected_PW = trace.samples_PK @ witnesses.values_KW
    size_PW = np.abs(trace.samples_PK) @ np.abs(witnesses.values_KW) + MIN_DENOMINATOR
    error = float((np.abs(witnesses.samples_PW - expected_PW) / size_PW).max())
    if error > _WITNESS_TOLERANCE:
        raise unusable(name, f"it is not linear in the sample (off by {error:.1e}): it clips, thresholds or normalises")
