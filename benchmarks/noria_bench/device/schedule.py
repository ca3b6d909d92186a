"""What the device bench does, in which order, and whether the next part still fits its time. Pure: no clock, no torch.

Parts are ordered by importance, so that a slow device or a small budget loses what matters least. A part is left out when it is
predicted not to fit what is left, when fewer rows did not fit the memory, or when its mode failed before; the next ones are
still looked at.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

Mode = Literal["eager", "channels last", "graphs", "compiled", "compiled graphs"]
Status = Literal["ok", "out of memory", "failed"]

ROWS = (2, 16, 8, 32, 4, 1)  # one guided image, eight of them, then the rest
GPU_MODES: tuple[Mode, ...] = ("eager", "channels last", "graphs")
CPU_MODES: tuple[Mode, ...] = ("eager", "channels last")
COMPILED: tuple[Mode, ...] = ("compiled", "compiled graphs")
_CAPTURED_FROM: dict[Mode, Mode] = {
    "graphs": "channels last",
    "compiled graphs": "compiled",
}  # where one fails, so does its capture


@dataclass(frozen=True)
class PeakMeasurement:
    """The largest matrix product rate."""


@dataclass(frozen=True)
class StepMeasurement:
    """One step of a UNet."""

    model: str
    side_px: int
    rows: int
    mode: Mode


@dataclass(frozen=True)
class ServingMeasurement:
    """The seed's loop and the wheel, one after the other, for `seconds` each."""

    traffic: Literal["alike", "mixed"]
    seconds: float


Measurement = PeakMeasurement | StepMeasurement | ServingMeasurement


@dataclass(frozen=True)
class FinishedMeasurement:
    """A part that was tried."""

    measurement: Measurement
    status: Status
    seconds: float  # that it took, all in all
    step_s: float | None = None  # of a StepPart that worked


def gpu_measurements(*, quick: bool) -> tuple[Measurement, ...]:
    """All that a GPU is asked; `quick` is a sample of it."""
    rows = ROWS[:2] if quick else ROWS
    serving = [ServingMeasurement("alike", 8.0 if quick else 20.0), ServingMeasurement("mixed", 8.0 if quick else 20.0)]
    measurements: list[Measurement] = [PeakMeasurement(), *_step_measurements("sd15", 512, rows, GPU_MODES)]
    if quick:
        return (*measurements, *serving, *_step_measurements("sdxl", 1024, rows, GPU_MODES))
    measurements += [*serving, *_step_measurements("sd15", 512, (16,), COMPILED)]  # nobody knows what compiling takes
    measurements += [
        *_step_measurements("sdxl", 1024, rows, GPU_MODES),
        *_step_measurements("sdxl", 1024, (16,), COMPILED),
    ]
    measurements += [*_step_measurements("sdxl", 512, rows, GPU_MODES)]
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
    """All that a CPU is asked: SD1.5's UNet at sizes that it can do, the bundled one at its own."""
    few, many = ((2,), (2, 16)) if quick else ((2, 4, 1), ROWS)
    seconds = 5.0 if quick else 25.0
    measurements: list[Measurement] = [PeakMeasurement(), *_step_measurements("sd15", 64, few, CPU_MODES)]
    measurements += [ServingMeasurement("alike", seconds), ServingMeasurement("mixed", seconds)]
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
    """All modes of one number of rows, then of the next: what is compiled for one is captured before it is dropped."""
    return (StepMeasurement(model, side_px, count, mode) for count in rows for mode in modes)


@dataclass(frozen=True)
class InitialEstimate:
    """What work takes on a device of which nothing is known yet: deliberately slow, as a part that is left out can be asked for again."""

    flops_per_s: float
    build_s: float  # of a UNet
    compile_s: float
    serving_setup_s: float


GPU_ESTIMATE = InitialEstimate(flops_per_s=30e12, build_s=8.0, compile_s=90.0, serving_setup_s=25.0)
CPU_ESTIMATE = InitialEstimate(flops_per_s=15e9, build_s=25.0, compile_s=90.0, serving_setup_s=25.0)


def num_timed_calls(step_s: float) -> int:
    """How often a step of this length is timed: for a second, but 3 to 20 times."""
    return max(3, min(20, math.ceil(1.0 / step_s)))


def predict_s(
    measurement: Measurement,
    finished: Sequence[FinishedMeasurement],
    flops_of_row: Callable[[str, int], float],
    estimate: InitialEstimate,
) -> float:
    """What a part will take, from what others took."""
    match measurement:
        case PeakMeasurement():
            return 5.0
        case ServingMeasurement(_, seconds):
            setup_s = (
                0.0
                if any(isinstance(each.measurement, ServingMeasurement) for each in finished)
                else estimate.serving_setup_s
            )
            return setup_s + 2 * 1.3 * seconds  # a batch that has begun is finished
        case StepMeasurement(model):
            step_s = _predict_step_s(measurement, finished, flops_of_row, estimate)
            is_built = bool(finished) and finished[-1].status == "ok" and _model_of(finished[-1].measurement) == model
            warm_up_s = 5 * step_s + 0.5
            compile_s = _predict_compile_s(measurement, finished, estimate)
            return (0.0 if is_built else estimate.build_s) + compile_s + warm_up_s + num_timed_calls(step_s) * step_s


def _model_of(measurement: Measurement) -> str | None:
    """Whose UNet is in memory after it."""
    return measurement.model if isinstance(measurement, StepMeasurement) else None


def _predict_step_s(
    measurement: StepMeasurement,
    finished: Sequence[FinishedMeasurement],
    flops_of_row: Callable[[str, int], float],
    estimate: InitialEstimate,
) -> float:
    """From the measured step of the same model whose work is nearest; a smaller step may take as long as a larger one."""
    work = measurement.rows * flops_of_row(measurement.model, measurement.side_px)
    measured = [
        (each.measurement.rows * flops_of_row(each.measurement.model, each.measurement.side_px), each.step_s)
        for each in finished
        if isinstance(each.measurement, StepMeasurement)
        and each.measurement.model == measurement.model
        and each.step_s is not None
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
        return 0.0  # it is only captured
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
    """Why a part is left out; None: it is done."""
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
