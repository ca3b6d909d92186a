"""The measurements of the device bench, their order, and whether the next one fits the time. Pure: no clock, no torch.

Measurements are ordered by importance, so that a slow device or a small budget loses the least important ones. A
measurement is skipped if its predicted duration exceeds the remaining time, if fewer rows exceeded the memory, or if
its mode failed before; later ones are still considered.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

Mode = Literal["eager", "channels last", "graphs", "compiled", "compiled graphs"]
Status = Literal["ok", "out of memory", "failed"]

# One guided image, eight of them, then the rest.
ROWS = (2, 16, 8, 32, 4, 1)
GPU_MODELS = ("sd15", "sdxl", "z-image", "flux")
# Rows of large transformers, whose images have one row each.
TRANSFORMER_ROWS = (1, 4, 2, 8)
GPU_MODES: tuple[Mode, ...] = ("eager", "channels last", "graphs")
CPU_MODES: tuple[Mode, ...] = ("eager", "channels last")
COMPILED: tuple[Mode, ...] = ("compiled", "compiled graphs")
# If a mode fails, so does its capture.
_CAPTURED_FROM: dict[Mode, Mode] = {"graphs": "channels last", "compiled graphs": "compiled"}


@dataclass(frozen=True)
class PeakMeasurement:
    """The maximum rate of matrix products."""

    kind: ClassVar = "peak"


@dataclass(frozen=True)
class StepMeasurement:
    """The time of one step of a denoiser."""

    kind: ClassVar = "step"

    model: str
    side_px: int
    rows: int
    mode: Mode


@dataclass(frozen=True)
class MixedSizesMeasurement:
    """The time of one call with rows of two sizes against a call for each size, of a denoiser that takes both."""

    kind: ClassVar = "mixed sizes"

    model: str
    sides_px: tuple[int, int]
    rows: int  # number of rows of each size


@dataclass(frozen=True)
class ServingMeasurement:
    """The reference loop and Noria's engine, one after the other, for `seconds` each."""

    kind: ClassVar = "serving"

    traffic: Literal["uniform", "mixed"]
    seconds: float


Measurement = PeakMeasurement | StepMeasurement | MixedSizesMeasurement | ServingMeasurement


@dataclass(frozen=True)
class FinishedMeasurement:
    """A measurement that was tried."""

    measurement: Measurement
    status: Status
    seconds: float  # its total duration
    step_s: float | None = None  # duration of a step, after a successful StepMeasurement


def gpu_measurements(models: Collection[str] = GPU_MODELS, *, quick: bool) -> tuple[Measurement, ...]:
    """Measurements of these models on a GPU; the serving ones are of sd15. `quick` is a short version."""
    every = _all_gpu_measurements(quick=quick)
    return tuple(
        each for each in every if getattr(each, "model", "sd15") in models or isinstance(each, PeakMeasurement)
    )


def _all_gpu_measurements(*, quick: bool) -> tuple[Measurement, ...]:
    rows = ROWS[:2] if quick else ROWS
    serving = [
        ServingMeasurement("uniform", 8.0 if quick else 20.0),
        ServingMeasurement("mixed", 8.0 if quick else 20.0),
    ]
    measurements: list[Measurement] = [PeakMeasurement(), *_step_measurements("sd15", 512, rows, GPU_MODES)]
    sdxl = _step_measurements("sdxl", 1024, rows, GPU_MODES)
    if quick:
        return (*measurements, *serving, *sdxl)
    measurements += [*serving, *sdxl]
    for model in ("z-image", "flux"):
        for side_px in (1024, 512):
            # A list of rows has no fixed addresses.
            modes: tuple[Mode, ...] = ("eager",) if model == "z-image" else ("eager", "graphs")
            measurements += _step_measurements(model, side_px, TRANSFORMER_ROWS, modes)
        if model == "z-image":
            measurements += [MixedSizesMeasurement(model, (512, 1024), count) for count in (1, 4)]
            measurements += [MixedSizesMeasurement(model, (512, 768), count) for count in (1, 4)]
        measurements += _step_measurements(model, 1024, (4,), COMPILED[:1] if model == "z-image" else COMPILED)
    measurements += _step_measurements("sd15", 512, (16,), COMPILED)
    measurements += _step_measurements("sdxl", 1024, (16,), COMPILED)
    measurements += _step_measurements("sdxl", 512, rows, GPU_MODES)
    measurements += [
        *_step_measurements("sd15", 1024, rows, GPU_MODES),
        *_step_measurements("sd15", 512, (2,), COMPILED),
    ]
    measurements += [
        *_step_measurements("sd15", 1024, (16, 2), COMPILED),
        *_step_measurements("sd15", 512, (8, 32, 4, 1), COMPILED),
    ]
    measurements += [
        *_step_measurements("sdxl", 1024, (2,), COMPILED),
        *_step_measurements("sdxl", 512, (16, 2), COMPILED),
    ]
    return tuple(measurements)


def cpu_measurements(bundled_px: int, *, quick: bool) -> tuple[Measurement, ...]:
    """All measurements on a CPU: SD1.5's UNet at feasible sizes, the bundled one at its default size."""
    few, many = ((2,), (2, 16)) if quick else ((2, 4, 1), ROWS)
    seconds = 5.0 if quick else 25.0
    measurements: list[Measurement] = [PeakMeasurement(), *_step_measurements("sd15", 64, few, CPU_MODES)]
    measurements += [ServingMeasurement("uniform", seconds), ServingMeasurement("mixed", seconds)]
    measurements += _step_measurements("bundled", bundled_px, many, CPU_MODES)
    if not quick:
        measurements += [
            *_step_measurements("sd15", 128, few, CPU_MODES),
            *_step_measurements("bundled", bundled_px, (16, 2), ("compiled",)),
        ]
    return tuple(measurements)


def _step_measurements(
    model: str, side_px: int, rows: Sequence[int], modes: Sequence[Mode]
) -> Iterator[StepMeasurement]:
    """All modes of one number of rows, then of the next, so that a compiled UNet is captured before it is dropped."""
    return (StepMeasurement(model, side_px, count, mode) for count in rows for mode in modes)


@dataclass(frozen=True)
class InitialEstimate:
    """The assumed speed of an unknown device.

    Deliberately slow, since a skipped measurement can be made in a later run.
    """

    flops_per_s: float
    build_s: float  # time to build a denoiser
    compile_s: float
    serving_setup_s: float


GPU_ESTIMATE = InitialEstimate(flops_per_s=30e12, build_s=8.0, compile_s=90.0, serving_setup_s=25.0)
CPU_ESTIMATE = InitialEstimate(flops_per_s=15e9, build_s=25.0, compile_s=90.0, serving_setup_s=25.0)


def num_timed_calls(step_s: float) -> int:
    """How often a step of this length is timed: for about a second, 3 to 20 times."""
    return max(3, min(20, math.ceil(1.0 / step_s)))


def predict_s(
    measurement: Measurement,
    finished: Sequence[FinishedMeasurement],
    flops_of_row: Callable[[str, int], float],
    estimate: InitialEstimate,
) -> float:
    """The predicted seconds of a measurement, from the finished ones."""
    match measurement:
        case PeakMeasurement():
            return 5.0
        case ServingMeasurement(_, seconds):
            setup_s = (
                0.0
                if any(isinstance(each.measurement, ServingMeasurement) for each in finished)
                else estimate.serving_setup_s
            )
            # A batch that has started is completed.
            return setup_s + 2 * 1.3 * seconds
        case MixedSizesMeasurement(model, sides_px, rows):
            work = sum(rows * flops_of_row(model, side_px) for side_px in sides_px)
            step_s = _predict_step_s(model, work, finished, flops_of_row, estimate)
            is_built = bool(finished) and finished[-1].status == "ok" and _model_of(finished[-1].measurement) == model
            return (0.0 if is_built else estimate.build_s) + 2 * (2 + num_timed_calls(step_s)) * step_s
        case StepMeasurement(model):
            work = measurement.rows * flops_of_row(model, measurement.side_px)
            step_s = _predict_step_s(model, work, finished, flops_of_row, estimate)
            is_built = bool(finished) and finished[-1].status == "ok" and _model_of(finished[-1].measurement) == model
            warm_up_s = 5 * step_s + 0.5
            compile_s = _predict_compile_s(measurement, finished, estimate)
            return (0.0 if is_built else estimate.build_s) + compile_s + warm_up_s + num_timed_calls(step_s) * step_s


def _model_of(measurement: Measurement) -> str | None:
    """The model whose denoiser is in memory after the measurement."""
    return measurement.model if isinstance(measurement, StepMeasurement | MixedSizesMeasurement) else None


def _predict_step_s(
    model: str,
    work: float,
    finished: Sequence[FinishedMeasurement],
    flops_of_row: Callable[[str, int], float],
    estimate: InitialEstimate,
) -> float:
    """From the measured step of the same model with the nearest work.

    A smaller step may take as long as a larger one.
    """
    measured = [
        (each.measurement.rows * flops_of_row(each.measurement.model, each.measurement.side_px), each.step_s)
        for each in finished
        if isinstance(each.measurement, StepMeasurement) and each.measurement.model == model and each.step_s is not None
    ]
    if not measured:
        return work / estimate.flops_per_s
    other, step_s = min(measured, key=lambda pair: abs(math.log(pair[0] / work)))
    return step_s * max(1.0, work / other)


def _predict_compile_s(
    measurement: StepMeasurement, finished: Sequence[FinishedMeasurement], estimate: InitialEstimate
) -> float:
    if measurement.mode not in COMPILED:
        return 0.0
    if finished and finished[-1].measurement == replace(measurement, mode="compiled"):
        # Compiled already: it is only captured.
        return 0.0
    durations_s = [
        each.seconds
        for each in finished
        if isinstance(each.measurement, StepMeasurement)
        and (each.measurement.model, each.measurement.mode) == (measurement.model, "compiled")
    ]
    return max(durations_s) if durations_s else estimate.compile_s * (2.0 if measurement.model == "sdxl" else 1.0)


def skip_reason(
    measurement: Measurement, finished: Iterable[FinishedMeasurement], predicted_s: float, remaining_s: float
) -> str | None:
    """Why a measurement is skipped; None: it is made."""
    if predicted_s > remaining_s:
        return f"predicted to take {predicted_s:.0f} s, {max(0.0, remaining_s):.0f} s are left"
    if not isinstance(measurement, StepMeasurement):
        return None
    modes = (measurement.mode, _CAPTURED_FROM.get(measurement.mode, measurement.mode))
    for each in finished:
        if (
            not isinstance(each.measurement, StepMeasurement)
            or each.measurement.model != measurement.model
            or each.measurement.mode not in modes
        ):
            continue
        if each.status == "failed":
            return f"{each.measurement.mode} failed before"
        if (
            each.status == "out of memory"
            and each.measurement.side_px == measurement.side_px
            and each.measurement.rows <= measurement.rows
        ):
            return f"{each.measurement.rows} rows did not fit the memory"
    return None
