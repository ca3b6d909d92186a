"""Carries a plan out part by part within a budget; what was found is saved after each, so that a kill keeps what was measured."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from noria_bench.device.architectures import Architecture, flops_of_row
from noria_bench.device.device_report import DeviceReport, Omission
from noria_bench.device.hardware import DTYPES
from noria_bench.device.schedule import (
    FinishedMeasurement,
    InitialEstimate,
    Measurement,
    PeakMeasurement,
    ServingMeasurement,
    Status,
    StepMeasurement,
    predict_s,
    skip_reason,
)
from noria_bench.device.step_timing import StepBench, measure_matrix_peak

if TYPE_CHECKING:
    from noria_bench.device.serving import ServingSetup

_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "ALLOC_FAILED")  # where it is a plain RuntimeError


class DeviceBench:
    """Fills a report; `save` is called after each part, `say` is told what happens, `end_s` is of `time.monotonic`."""

    def __init__(
        self,
        device: torch.device,
        architectures: dict[str, Architecture],
        estimate: InitialEstimate,
        report: DeviceReport,
        save: Callable[[], None],
        log_status: Callable[[str], None],
        end_s: float,
    ) -> None:
        self._device, self._architectures, self._estimate = device, architectures, estimate
        self._report, self._save, self._log_status, self._end_s = report, save, log_status, end_s
        self._steps = StepBench(device, DTYPES[report.dtype], architectures)
        self._serving_setup: ServingSetup | None = None
        self._finished: list[FinishedMeasurement] = []

    def run(self, measurements: Sequence[Measurement]) -> None:
        """All of them that fit; returns early only by an exception from outside, such as KeyboardInterrupt."""
        for measurement in measurements:
            predicted_s = predict_s(measurement, self._finished, self._flops_of_row, self._estimate)
            reason = skip_reason(measurement, self._finished, predicted_s, self._end_s - time.monotonic())
            if reason is not None:
                self._omit(measurement, reason)
                continue
            self._log_status(f"{describe(measurement)} …")
            started = time.monotonic()
            status, step_s = self._try(measurement)
            if status != "ok":
                self._serving_setup = None
                self._steps.release()  # not before the exception is gone, which holds what was computed
            self._finished.append(FinishedMeasurement(measurement, status, time.monotonic() - started, step_s))
            self._save()
        self._save()

    def _flops_of_row(self, model: str, side_px: int) -> float:
        return flops_of_row(self._architectures[model], side_px)

    def _omit(self, measurement: Measurement, reason: str) -> None:
        self._report.omitted.append(
            Omission({"kind": type(measurement).__name__, **dataclasses.asdict(measurement)}, reason)
        )

    def _try(self, measurement: Measurement) -> tuple[Status, float | None]:
        """Do it; whatever fails is a result, and the next part is done all the same."""
        try:
            return "ok", self._measure(measurement)
        except ModuleNotFoundError as error:
            self._omit(measurement, f"it needs {error.name}, which is not installed: pip install {error.name}")
            return "failed", None
        except Exception as error:  # torch, its compiler and diffusers raise many kinds
            first_line = f"{type(error).__name__}: {(str(error) or '–').splitlines()[0]}"
            out_of_memory = _is_out_of_memory(error)
            reason = f"{describe(measurement)}: {'out of memory' if out_of_memory else first_line}"
            self._omit(measurement, reason)
            self._log_status(reason)
            return ("out of memory" if out_of_memory else "failed"), None

    def _measure(self, measurement: Measurement) -> float | None:
        match measurement:
            case PeakMeasurement():
                self._report.peak_flops_per_s = measure_matrix_peak(self._device, DTYPES[self._report.dtype])
                self._log_status(f"  {self._report.peak_flops_per_s / 1e12:.3g} TFLOP/s")
                return None
            case StepMeasurement():
                self._release_serving_setup()
                # Shapes are fixed here, so cuDNN may time its algorithms; the wheel's change, and its engine does not.
                torch.backends.cudnn.benchmark = True
                # In float32, convolutions would be TF32 by default, products are not, and neither is the peak.
                torch.backends.cudnn.allow_tf32 = False
                step_time = self._steps.measure(measurement, self._report.peak_flops_per_s)
                self._report.steps.append(step_time)
                self._log_status(f"  {1000 * step_time.step_s:.4g} ms, {step_time.images_per_s:.3g} images/s")
                return step_time.step_s
            case ServingMeasurement():
                self._serve(measurement)
                return None

    def _serve(self, measurement: ServingMeasurement) -> None:
        from noria_bench.device.serving import serve_both

        self._steps.release()
        if self._serving_setup is None:
            self._serving_setup = self._make_serving_setup()
        for result in serve_both(self._serving_setup, measurement.traffic, measurement.seconds):
            self._report.serving.append(result)
            self._log_status(f"  {result.server}: {result.images_per_s or 0.0:.3g} images/s")

    def _make_serving_setup(self) -> "ServingSetup":
        """SD1.5 with random weights on a GPU, the bundled model on a CPU, in the executor that the engine has."""
        import msgspec

        from noria.config import EngineConfig
        from noria.engine.diffusion.executor import DiffusionExecutor
        from noria.engine.diffusion.loading import detect_machine, load_executor
        from noria.engine.resources import resolve_auto
        from noria.models.catalog import open_model
        from noria_bench.device.serving import set_up

        config = msgspec.convert({"dtype": self._report.dtype}, EngineConfig)
        if self._device.type == "cpu":
            spec = open_model("bundled")
            executor, config = load_executor(spec, config, "cpu")
            return set_up(executor, spec, config)
        from noria_bench.device.random_model import RANDOM_SPEC, make_random_model

        torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 = False, True  # as an engine has them
        config = resolve_auto(config, RANDOM_SPEC, str(self._device), detect_machine())
        model = make_random_model(self._device, DTYPES[self._report.dtype], config)
        return set_up(DiffusionExecutor(model, config), RANDOM_SPEC, config)

    def _release_serving_setup(self) -> None:
        if self._serving_setup is not None:
            self._serving_setup = None
            self._steps.free_cache()


def _is_out_of_memory(error: BaseException) -> bool:
    """Whether it is, or came of, too little memory: a capture that is broken off by it raises an error of its own."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or any(text in str(error) for text in _OUT_OF_MEMORY):
        return True
    return error.__context__ is not None and _is_out_of_memory(error.__context__)


def describe(measurement: Measurement) -> str:
    """A part in words."""
    match measurement:
        case PeakMeasurement():
            return "matrix peak"
        case StepMeasurement(model, side_px, rows, mode):
            return f"{model} {side_px}², {rows} rows, {mode}"
        case ServingMeasurement(traffic, seconds):
            return f"8 users, {traffic}, {seconds:.0f} s each for the seed's loop and the wheel"
