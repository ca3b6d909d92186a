"""Carries out measurements within a time budget, and saves the report after each: a killed bench keeps its results."""

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from noria.engine.resources.out_of_memory import is_out_of_memory
from noria_bench.device.architectures import Architecture, flops_of_row
from noria_bench.device.device_report import DeviceReport, Omission
from noria_bench.device.hardware import DTYPES
from noria_bench.device.schedule import (
    FinishedMeasurement,
    InitialEstimate,
    Measurement,
    MixedSizesMeasurement,
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


class DeviceBench:
    """Fills a report.

    `save` is called after each measurement, `log_status` with messages; `end_s` is of `time.monotonic`.
    """

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
        """Make all measurements that fit the time.

        Errors are recorded, only exceptions such as KeyboardInterrupt propagate.
        """
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
                # Only now: the exception held references to tensors.
                self._steps.release()
            self._finished.append(FinishedMeasurement(measurement, status, time.monotonic() - started, step_s))
            self._save()
        self._save()

    def _flops_of_row(self, model: str, side_px: int) -> float:
        return flops_of_row(self._architectures[model], side_px)

    def _omit(self, measurement: Measurement, reason: str) -> None:
        self._report.omitted.append(Omission({"kind": measurement.kind, **dataclasses.asdict(measurement)}, reason))

    def _try(self, measurement: Measurement) -> tuple[Status, float | None]:
        """Make one measurement. A failure is recorded as an omission; returns the status and the step's seconds."""
        try:
            return "ok", self._measure(measurement)
        except ModuleNotFoundError as error:
            self._omit(measurement, f"it needs {error.name}, which is not installed: pip install {error.name}")
            return "failed", None
        # torch, its compiler and diffusers raise errors of many kinds.
        except Exception as error:
            first_line = f"{type(error).__name__}: {(str(error) or '–').splitlines()[0]}"
            out_of_memory = _is_caused_by_out_of_memory(error)
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
                # Shapes are fixed here, so cuDNN may time its algorithms. The engine's shapes vary, so it does not.
                torch.backends.cudnn.benchmark = True
                # By default, float32 convolutions use TF32; matrix products and the measured peak do not.
                torch.backends.cudnn.allow_tf32 = False
                step_time = self._steps.measure(measurement, self._report.peak_flops_per_s)
                self._report.steps.append(step_time)
                self._log_status(f"  {1000 * step_time.step_s:.4g} ms, {step_time.images_per_s:.3g} images/s")
                return step_time.step_s
            case MixedSizesMeasurement():
                self._release_serving_setup()
                mixed = self._steps.measure_mixed_sizes(measurement)
                self._report.mixed_sizes.append(mixed)
                self._log_status(f"  {1000 * mixed.together_s:.4g} ms together, {1000 * mixed.apart_s:.4g} ms apart")
                return None
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
        """The engine's executor, with SD1.5 and random weights on a GPU, with the bundled model on a CPU."""
        import msgspec

        from noria.config import EngineConfig
        from noria.engine.diffusion.executor import DiffusionExecutor
        from noria.engine.diffusion.loading import load_executor
        from noria.engine.diffusion.sizing.auto_settings import detect_machine, resolve_auto
        from noria.models.catalog import open_model_of
        from noria.protocol.diffusion import DiffusionModelSpec
        from noria_bench.device.serving import set_up

        config = msgspec.convert({"dtype": self._report.dtype}, EngineConfig)
        if self._device.type == "cpu":
            spec = open_model_of(DiffusionModelSpec, "bundled", EngineConfig())
            executor, config = load_executor(spec, config, "cpu")
            return set_up(executor, spec, config)
        from noria_bench.device.random_model import RANDOM_SPEC, make_random_model

        # As in an engine.
        torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32 = False, True
        config = resolve_auto(config, RANDOM_SPEC, str(self._device), detect_machine())
        model = make_random_model(self._device, DTYPES[self._report.dtype], config)
        return set_up(DiffusionExecutor(model, config), RANDOM_SPEC, config)

    def _release_serving_setup(self) -> None:
        if self._serving_setup is not None:
            self._serving_setup = None
            self._steps.free_cache()


def _is_caused_by_out_of_memory(error: BaseException) -> bool:
    """Whether the error, or its context, is out of memory: a capture that fails for it raises an error of its own."""
    return is_out_of_memory(error) or (error.__context__ is not None and _is_caused_by_out_of_memory(error.__context__))


def describe(measurement: Measurement) -> str:
    """A measurement as text."""
    match measurement:
        case PeakMeasurement():
            return "matrix peak"
        case StepMeasurement(model, side_px, rows, mode):
            return f"{model} {side_px}², {rows} rows, {mode}"
        case MixedSizesMeasurement(model, (first_px, second_px), rows):
            return f"{model}, {rows} × {first_px}² + {rows} × {second_px}²"
        case ServingMeasurement(traffic, seconds):
            return f"8 users, {traffic}, {seconds:.0f} s each for the reference loop and Noria's engine"
