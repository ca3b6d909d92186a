"""Carries a plan out part by part within a budget; what was found is saved after each, so that a kill keeps what was measured."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from noria.bench.device.architectures import Architecture, flops_of_row
from noria.bench.device.hardware import DTYPES
from noria.bench.device.plan import Done, Guess, Part, PeakPart, ServingPart, Status, StepPart, predict_s, why_not
from noria.bench.device.report import Omission, Report
from noria.bench.device.steps import StepBench, matrix_peak

if TYPE_CHECKING:
    from noria.bench.device.serving import Stand

_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "ALLOC_FAILED")  # where it is a plain RuntimeError


class DeviceBench:
    """Fills a report; `save` is called after each part, `say` is told what happens, `end_s` is of `time.monotonic`."""

    def __init__(
        self,
        device: torch.device,
        architectures: dict[str, Architecture],
        guess: Guess,
        report: Report,
        save: Callable[[], None],
        say: Callable[[str], None],
        end_s: float,
    ) -> None:
        self._device, self._architectures, self._guess = device, architectures, guess
        self._report, self._save, self._say, self._end_s = report, save, say, end_s
        self._steps = StepBench(device, DTYPES[report.dtype], architectures)
        self._stand: Stand | None = None
        self._done: list[Done] = []

    def run(self, parts: Sequence[Part]) -> None:
        """All of them that fit; returns early only by an exception from outside, such as KeyboardInterrupt."""
        for part in parts:
            predicted_s = predict_s(part, self._done, self._flops_of_row, self._guess)
            why = why_not(part, self._done, predicted_s, self._end_s - time.monotonic())
            if why is not None:
                self._omit(part, why)
                continue
            self._say(f"{describe(part)} …")
            started = time.monotonic()
            status, step_s = self._try(part)
            if status != "ok":
                self._stand = None
                self._steps.drop()  # not before the exception is gone, which holds what was computed
            self._done.append(Done(part, status, time.monotonic() - started, step_s))
            self._save()
        self._save()

    def _flops_of_row(self, model: str, side_px: int) -> float:
        return flops_of_row(self._architectures[model], side_px)

    def _omit(self, part: Part, why: str) -> None:
        self._report.omitted.append(Omission({"kind": type(part).__name__, **dataclasses.asdict(part)}, why))

    def _try(self, part: Part) -> tuple[Status, float | None]:
        """Do it; whatever fails is a result, and the next part is done all the same."""
        try:
            return "ok", self._do(part)
        except ModuleNotFoundError as error:
            self._omit(part, f"it needs {error.name}, which is not installed: pip install {error.name}")
            return "failed", None
        except Exception as error:  # torch, its compiler and diffusers raise many kinds
            first_line = f"{type(error).__name__}: {(str(error) or '–').splitlines()[0]}"
            full = _is_of_memory(error)
            why = f"{describe(part)}: {'out of memory' if full else first_line}"
            self._omit(part, why)
            self._say(why)
            return ("out of memory" if full else "failed"), None

    def _do(self, part: Part) -> float | None:
        match part:
            case PeakPart():
                self._report.peak_flops_per_s = matrix_peak(self._device, DTYPES[self._report.dtype])
                self._say(f"  {self._report.peak_flops_per_s / 1e12:.3g} TFLOP/s")
                return None
            case StepPart():
                self._release_stand()
                # Shapes are fixed here, so cuDNN may time its algorithms; the wheel's change, and its engine does not.
                torch.backends.cudnn.benchmark = True
                # In float32, convolutions would be TF32 by default, products are not, and neither is the peak.
                torch.backends.cudnn.allow_tf32 = False
                found = self._steps.measure(part, self._report.peak_flops_per_s)
                self._report.steps.append(found)
                self._say(f"  {1000 * found.step_s:.4g} ms, {found.images_per_s:.3g} images/s")
                return found.step_s
            case ServingPart():
                self._serve(part)
                return None

    def _serve(self, part: ServingPart) -> None:
        from noria.bench.device.serving import serve_both

        self._steps.drop()
        if self._stand is None:
            self._stand = self._set_up()
        for served in serve_both(self._stand, part.traffic, part.seconds):
            self._report.serving.append(served)
            self._say(f"  {served.server}: {served.images_per_s or 0.0:.3g} images/s")

    def _set_up(self) -> "Stand":
        """SD1.5 with random weights on a GPU, the bundled model on a CPU, in the executor that the engine has."""
        import msgspec

        from noria.bench.device.serving import set_up
        from noria.config import EngineConfig
        from noria.engine.diffusion import DiffusionExecutor
        from noria.engine.loading import load_executor, look_at_machine
        from noria.engine.resources import resolve
        from noria.models.catalog import open_model

        config = msgspec.convert({"dtype": self._report.dtype}, EngineConfig)
        if self._device.type == "cpu":
            spec = open_model("bundled")
            executor, config = load_executor(spec, config, "cpu")
            return set_up(executor, spec, config)
        from noria.bench.device.random_model import RANDOM_SPEC, make_random_model

        torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 = False, True  # as an engine has them
        config = resolve(config, RANDOM_SPEC, str(self._device), look_at_machine())
        model = make_random_model(self._device, DTYPES[self._report.dtype], config)
        return set_up(DiffusionExecutor(model, config), RANDOM_SPEC, config)

    def _release_stand(self) -> None:
        if self._stand is not None:
            self._stand = None
            self._steps.tidy()


def _is_of_memory(error: BaseException) -> bool:
    """Whether it is, or came of, too little memory: a capture that is broken off by it raises an error of its own."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or any(text in str(error) for text in _OUT_OF_MEMORY):
        return True
    return error.__context__ is not None and _is_of_memory(error.__context__)


def describe(part: Part) -> str:
    """A part in words."""
    match part:
        case PeakPart():
            return "matrix peak"
        case StepPart(model, side_px, rows, mode):
            return f"{model} {side_px}², {rows} rows, {mode}"
        case ServingPart(traffic, seconds):
            return f"8 users, {traffic}, {seconds:.0f} s each for the seed's loop and the wheel"
