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
_CAPTURED: dict[Mode, Mode] = {
    "graphs": "channels last",
    "compiled graphs": "compiled",
}  # where one fails, so does its capture


@dataclass(frozen=True)
class PeakPart:
    """The largest matrix product rate."""


@dataclass(frozen=True)
class StepPart:
    """One step of a UNet."""

    model: str
    side_px: int
    rows: int
    mode: Mode


@dataclass(frozen=True)
class ServingPart:
    """The seed's loop and the wheel, one after the other, for `seconds` each."""

    traffic: Literal["alike", "mixed"]
    seconds: float


Part = PeakPart | StepPart | ServingPart


@dataclass(frozen=True)
class Done:
    """A part that was tried."""

    part: Part
    status: Status
    seconds: float  # that it took, all in all
    step_s: float | None = None  # of a StepPart that worked


def gpu_parts(*, quick: bool) -> tuple[Part, ...]:
    """All that a GPU is asked; `quick` is a sample of it."""
    rows = ROWS[:2] if quick else ROWS
    serving = [ServingPart("alike", 8.0 if quick else 20.0), ServingPart("mixed", 8.0 if quick else 20.0)]
    parts: list[Part] = [PeakPart(), *_steps("sd15", 512, rows, GPU_MODES)]
    if quick:
        return (*parts, *serving, *_steps("sdxl", 1024, rows, GPU_MODES))
    parts += [*serving, *_steps("sd15", 512, (16,), COMPILED)]  # nobody knows what compiling takes
    parts += [*_steps("sdxl", 1024, rows, GPU_MODES), *_steps("sdxl", 1024, (16,), COMPILED)]
    parts += [*_steps("sdxl", 512, rows, GPU_MODES)]
    parts += [*_steps("sd15", 1024, rows, GPU_MODES), *_steps("sd15", 512, (2,), COMPILED)]
    parts += [*_steps("sd15", 1024, (16, 2), COMPILED), *_steps("sd15", 512, (8, 32, 4, 1), COMPILED)]
    parts += [*_steps("sdxl", 1024, (2,), COMPILED), *_steps("sdxl", 512, (16, 2), COMPILED)]
    return tuple(parts)


def cpu_parts(bundled_px: int, *, quick: bool) -> tuple[Part, ...]:
    """All that a CPU is asked: SD1.5's UNet at sizes that it can do, the bundled one at its own."""
    few, many = ((2,), (2, 16)) if quick else ((2, 4, 1), ROWS)
    seconds = 5.0 if quick else 25.0
    parts: list[Part] = [PeakPart(), *_steps("sd15", 64, few, CPU_MODES)]
    parts += [ServingPart("alike", seconds), ServingPart("mixed", seconds)]
    parts += _steps("bundled", bundled_px, many, CPU_MODES)
    if not quick:
        parts += [*_steps("sd15", 128, few, CPU_MODES), *_steps("bundled", bundled_px, (16, 2), ("compiled",))]
    return tuple(parts)


def _steps(model: str, side_px: int, rows: Sequence[int], modes: Sequence[Mode]) -> Iterator[StepPart]:
    """All modes of one number of rows, then of the next: what is compiled for one is captured before it is dropped."""
    return (StepPart(model, side_px, count, mode) for count in rows for mode in modes)


@dataclass(frozen=True)
class Guess:
    """What work takes on a device of which nothing is known yet: deliberately slow, as a part that is left out can be asked for again."""

    flops_per_s: float
    build_s: float  # of a UNet
    compile_s: float
    serving_setup_s: float


GPU_GUESS = Guess(flops_per_s=30e12, build_s=8.0, compile_s=90.0, serving_setup_s=25.0)
CPU_GUESS = Guess(flops_per_s=15e9, build_s=25.0, compile_s=90.0, serving_setup_s=25.0)


def num_calls(step_s: float) -> int:
    """How often a step of this length is timed: for a second, but 3 to 20 times."""
    return max(3, min(20, math.ceil(1.0 / step_s)))


def predict_s(part: Part, done: Sequence[Done], flops_of_row: Callable[[str, int], float], guess: Guess) -> float:
    """What a part will take, from what others took."""
    match part:
        case PeakPart():
            return 5.0
        case ServingPart(_, seconds):
            setup_s = 0.0 if any(isinstance(each.part, ServingPart) for each in done) else guess.serving_setup_s
            return setup_s + 2 * 1.3 * seconds  # a batch that has begun is finished
        case StepPart(model):
            step_s = _predict_step_s(part, done, flops_of_row, guess)
            built = bool(done) and done[-1].status == "ok" and _model(done[-1].part) == model
            warm_up_s = 5 * step_s + 0.5
            compile_s = _predict_compile_s(part, done, guess)
            return (0.0 if built else guess.build_s) + compile_s + warm_up_s + num_calls(step_s) * step_s


def _model(part: Part) -> str | None:
    """Whose UNet is in memory after it."""
    return part.model if isinstance(part, StepPart) else None


def _predict_step_s(
    part: StepPart, done: Sequence[Done], flops_of_row: Callable[[str, int], float], guess: Guess
) -> float:
    """From the measured step of the same model whose work is nearest; a smaller step may take as long as a larger one."""
    work = part.rows * flops_of_row(part.model, part.side_px)
    measured = [
        (each.part.rows * flops_of_row(each.part.model, each.part.side_px), each.step_s)
        for each in done
        if isinstance(each.part, StepPart) and each.part.model == part.model and each.step_s is not None
    ]
    if not measured:
        return work / guess.flops_per_s
    other, step_s = min(measured, key=lambda pair: abs(math.log(pair[0] / work)))
    return step_s * max(1.0, work / other)


def _predict_compile_s(part: StepPart, done: Sequence[Done], guess: Guess) -> float:
    if part.mode not in COMPILED:
        return 0.0
    if done and done[-1].part == replace(part, mode="compiled"):
        return 0.0  # it is only captured
    took = [
        each.seconds
        for each in done
        if isinstance(each.part, StepPart) and (each.part.model, each.part.mode) == (part.model, "compiled")
    ]
    return max(took) if took else guess.compile_s * (2.0 if part.model == "sdxl" else 1.0)


def why_not(part: Part, done: Iterable[Done], predicted_s: float, left_s: float) -> str | None:
    """Why a part is left out; None: it is done."""
    if predicted_s > left_s:
        return f"predicted to take {predicted_s:.0f} s, {max(0.0, left_s):.0f} s are left"
    if not isinstance(part, StepPart):
        return None
    modes = (part.mode, _CAPTURED.get(part.mode, part.mode))
    for each in done:
        if not isinstance(each.part, StepPart) or each.part.model != part.model or each.part.mode not in modes:
            continue
        if each.status == "failed":
            return f"{each.part.mode} failed before"
        if each.status == "out of memory" and each.part.side_px == part.side_px and each.part.rows <= part.rows:
            return f"{each.part.rows} rows did not fit the memory"
    return None
