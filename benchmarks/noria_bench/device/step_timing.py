"""Times one step of a denoiser on a device in several modes, and compares its output with that of the eager mode.

Modes: *eager*; *channels last* (NHWC weights and inputs, of UNets); *graphs*: that, captured in a CUDA graph;
*compiled*: that, through torch.compile for exactly these shapes, of a transformer each repeated block; *compiled
graphs*: the compiled one, captured. This module knows no time budget and writes no files.
"""

import gc
import itertools
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from noria_bench.device.architectures import Architecture, Inputs, build_denoiser, flops_of_row, joined, make_inputs
from noria_bench.device.schedule import COMPILED, MixedSizesMeasurement, StepMeasurement, num_timed_calls

Step = Callable[[], torch.Tensor]

# Before a capture, as in torch's documentation: libraries choose kernels and allocate workspaces.
_NUM_WARM_UPS = 3


@dataclass(frozen=True)
class StepTime:
    """The result of one StepMeasurement."""

    model: str
    side_px: int
    rows: int
    mode: str
    setup_s: float  # time for compiling, capturing and the first call
    step_s: float  # median
    rows_per_s: float
    images_per_s: float  # at the model's usual guidance and number of steps; without text encoders and VAE
    flops_per_s: float
    peak_share: float | None  # share of the device's measured matrix peak
    peak_bytes: int  # maximum of the device's memory; on a CPU of the process, from its start
    max_difference: float | None  # from the eager output, relative to its largest value; None: no eager output


@dataclass(frozen=True)
class MixedSizesTime:
    """The result of one MixedSizesMeasurement: medians."""

    model: str
    sides_px: tuple[int, int]
    rows: int  # number of rows of each size
    together_s: float  # one call with all rows
    apart_s: float  # one call for each size


class StepBench:
    """Measures steps; keeps one denoiser at a time."""

    def __init__(self, device: torch.device, dtype: torch.dtype, architectures: dict[str, Architecture]) -> None:
        self._device, self._dtype, self._architectures = device, dtype, architectures
        self._loaded: tuple[str, Any] | None = None
        self._compiled: tuple[StepMeasurement, Any] | None = None
        self._eager: dict[tuple[str, int, int], torch.Tensor] = {}

    def release(self) -> None:
        """Free the denoiser and the cached memory."""
        self._loaded = None
        self._forget_compiled()
        self.free_cache()

    def free_cache(self) -> None:
        """Return unreferenced memory to the device. Exceptions hold references: call it after they are handled."""
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.no_grad()
    def measure(self, measurement: StepMeasurement, peak_flops: float | None) -> StepTime:
        """Make one measurement.

        Raises what torch raises: out of memory, no compiler, a kernel that cannot be captured.
        """
        architecture = self._architectures[measurement.model]
        denoiser = self._load(architecture)
        inputs = make_inputs(architecture, measurement.side_px, measurement.rows, self._device, self._dtype)
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        started = time.perf_counter()
        step = self._prepare(measurement, denoiser, inputs)
        output = step()
        synchronise(self._device)
        setup_s = time.perf_counter() - started
        once_s = time_calls(step, self._device, 1)[0]
        step_s = statistics.median(time_calls(step, self._device, num_timed_calls(once_s)))
        flops_per_s = measurement.rows * flops_of_row(architecture, measurement.side_px) / step_s
        return StepTime(
            measurement.model,
            measurement.side_px,
            measurement.rows,
            measurement.mode,
            setup_s=setup_s,
            step_s=step_s,
            rows_per_s=measurement.rows / step_s,
            images_per_s=measurement.rows / architecture.rows_of_image / step_s / architecture.default_steps,
            flops_per_s=flops_per_s,
            peak_share=flops_per_s / peak_flops if peak_flops else None,
            peak_bytes=max_memory_bytes(self._device),
            max_difference=self._difference_from_eager(measurement, output),
        )

    @torch.no_grad()
    def measure_mixed_sizes(self, measurement: MixedSizesMeasurement) -> MixedSizesTime:
        """Time one eager call with rows of both sizes, and a call for each size. Raises as `measure`."""
        architecture = self._architectures[measurement.model]
        denoiser = self._load(architecture)
        self._forget_compiled()
        apart = [
            make_inputs(architecture, side_px, measurement.rows, self._device, self._dtype)
            for side_px in measurement.sides_px
        ]
        together = joined(apart)

        def median_s(step: Callable[[], object]) -> float:
            step()
            once_s = time_calls(step, self._device, 1)[0]
            return statistics.median(time_calls(step, self._device, num_timed_calls(once_s)))

        return MixedSizesTime(
            measurement.model,
            measurement.sides_px,
            measurement.rows,
            median_s(lambda: denoiser(together.latents, **together.others, return_dict=False)),
            median_s(lambda: [inputs.predict(denoiser) for inputs in apart]),
        )

    def _load(self, architecture: Architecture) -> Any:
        if self._loaded is None or self._loaded[0] != architecture.name:
            self.release()
            self._loaded = architecture.name, build_denoiser(architecture, self._device, self._dtype)
        return self._loaded[1]

    def _prepare(self, measurement: StepMeasurement, denoiser: Any, inputs: Inputs) -> Step:
        """The step in its mode, over inputs with fixed addresses."""
        if self._architectures[measurement.model].is_unet:
            eager = measurement.mode == "eager"
            denoiser.to(memory_format=torch.contiguous_format if eager else torch.channels_last)
            inputs = inputs if eager else inputs.in_channels_last()
        if measurement.mode in COMPILED:
            denoiser = self._compile(measurement, denoiser)
        else:
            self._forget_compiled()

        def step() -> torch.Tensor:
            return inputs.predict(denoiser)

        return capture_graph(step, self._device) if measurement.mode in ("graphs", "compiled graphs") else step

    def _compile(self, measurement: StepMeasurement, denoiser: Any) -> Any:
        """The denoiser compiled for these shapes; the previous one is reused if its shapes are the same."""
        key = replace(measurement, mode="compiled")
        if self._compiled is None or self._compiled[0] != key:
            # The compiler is reset for each shape: after 8 of them torch would silently fall back to eager.
            self._forget_compiled()
            if self._architectures[measurement.model].is_unet:
                self._compiled = key, torch.compile(denoiser, dynamic=False)
            else:
                denoiser.compile_repeated_blocks(dynamic=False)
                self._compiled = key, denoiser
        return self._compiled[1]

    def _forget_compiled(self) -> None:
        # Conditional, since the compiler takes seconds to import.
        if self._compiled is not None:
            for module in self._compiled[1].modules():
                module._compiled_call_impl = None  # torch has no public way back
            self._compiled = None
            torch.compiler.reset()

    def _difference_from_eager(self, measurement: StepMeasurement, output: torch.Tensor) -> float | None:
        key, values = (measurement.model, measurement.side_px, measurement.rows), output.float().cpu()
        if measurement.mode == "eager":
            self._eager[key] = values
        reference = self._eager.get(key)
        return None if reference is None else float((values - reference).abs().max() / reference.abs().max())


@dataclass(frozen=True)
class _CapturedStep:
    step: Step  # keeps the inputs alive, which the graph reads at their addresses
    graph: torch.cuda.CUDAGraph
    output: torch.Tensor

    def __call__(self) -> torch.Tensor:
        self.graph.replay()
        return self.output


def capture_graph(step: Step, device: torch.device) -> Step:
    """Capture `step` as a CUDA graph.

    Each call replays it over the same inputs, and overwrites and returns the same output.
    """
    side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(_NUM_WARM_UPS):
            step()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = step()

    return _CapturedStep(step, graph, output)


def time_calls(step: Callable[[], object], device: torch.device, num_calls: int) -> list[float]:
    """Seconds of each of `num_calls` consecutive calls; on a GPU by CUDA events, without synchronising in between."""
    if device.type != "cuda":
        marks = [time.perf_counter()]
        for _ in range(num_calls):
            step()
            marks.append(time.perf_counter())
        return [end - start for start, end in itertools.pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(num_calls + 1)]  # type: ignore[no-untyped-call]
    events[0].record()
    for event in events[1:]:
        step()
        event.record()
    synchronise(device)
    return [start.elapsed_time(end) / 1000 for start, end in itertools.pairwise(events)]


def synchronise(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def max_memory_bytes(device: torch.device) -> int:
    """Peak memory of tensors since the statistics were reset; on a CPU, of the process since its start."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def measure_matrix_peak(device: torch.device, dtype: torch.dtype) -> float:
    """The maximum rate of large square matrix products, in floating-point operations per second.

    Float32 is without TF32.
    """
    sides = (4096, 8192, 16384) if device.type == "cuda" else (1024, 2048)
    best = 0.0
    for side in sides:
        left, right = (torch.randn(side, side, dtype=dtype, device=device) for _ in range(2))

        def product(left: torch.Tensor = left, right: torch.Tensor = right) -> torch.Tensor:
            return left @ right

        product()
        once_s = time_calls(product, device, 1)[0]
        best = max(best, 2 * side**3 / min(time_calls(product, device, num_timed_calls(5 * once_s))))
    return best
