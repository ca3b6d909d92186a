"""`noria bench device`: the time limit, a JSON file after each measurement, and a short table at the end."""

import contextlib
import pathlib
import signal
import sys
import time
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING

from noria_bench.device.options import DeviceOptions

if TYPE_CHECKING:
    import torch

    from noria_bench.device.architectures import Architecture
    from noria_bench.device.schedule import InitialEstimate, Measurement

# An exception that is raised in a destructor or a callback is lost: then the next one counts.
_REPEAT_S = 5.0


class TimeLimitError(BaseException):
    """The time of a block is over. No Exception, since those are failures of a measurement."""


def main(options: DeviceOptions, output: pathlib.Path | None) -> int:
    """Measure until the budget is spent, of which the import of torch is a part; returns the exit status."""
    started = time.monotonic()
    import torch

    from noria_bench.device.device_report import DeviceReport, table, write
    from noria_bench.device.hardware import choose_device, choose_dtype, describe_device
    from noria_bench.device.runner import DeviceBench
    from noria_bench.measurement.provenance import collect_provenance

    try:
        device = choose_device(options.device)
    except ValueError as error:
        print(f"noria: error: {error}", file=sys.stderr)
        return 2
    if device.type == "cuda":
        torch.cuda.set_device(device)
    header = collect_provenance()
    report = DeviceReport(
        header,
        describe_device(device, header["machine"]["cpu"]),
        choose_dtype(options.dtype, device),
        options.budget_s,
    )

    def save() -> None:
        report.seconds = time.monotonic() - started
        if output is not None:
            write(report, output)

    def log_status(text: str) -> None:
        print(f"[{time.monotonic() - started:4.0f} s] {text}", file=sys.stderr, flush=True)

    measurements, architectures, estimate = _select_measurements(device, options, report.notes)
    end_s, status = started + options.budget_s, 0
    bench = DeviceBench(device, architectures, estimate, report, save, log_status, end_s)
    try:
        with time_limit(end_s - time.monotonic()):
            bench.run(measurements)
        report.complete = True
    except TimeLimitError:
        report.complete = True
        report.notes.append("the time limit interrupted a measurement; it and the following ones are missing")
    except KeyboardInterrupt:
        status = 130
    save()
    print(table(report))
    return status


def _select_measurements(
    device: "torch.device", options: DeviceOptions, notes: list[str]
) -> "tuple[tuple[Measurement, ...], dict[str, Architecture], InitialEstimate]":
    from noria_bench.device.architectures import FLUX, SD15, SDXL, Z_IMAGE, bundled_architecture
    from noria_bench.device.schedule import CPU_ESTIMATE, GPU_ESTIMATE, cpu_measurements, gpu_measurements

    if device.type == "cuda":
        architectures = {each.name: each for each in (SD15, SDXL, Z_IMAGE, FLUX)}
        return gpu_measurements(options.models, quick=options.quick), architectures, GPU_ESTIMATE
    bundled_model = bundled_architecture()
    notes.append(
        "a CPU: SD1.5's UNet at small sizes, the bundled model at its default size, no SDXL; "
        "use a GPU for 512² and 1024²"
    )
    side_px = bundled_model.config["sample_size"] * bundled_model.latent_scale
    return cpu_measurements(side_px, quick=options.quick), {"sd15": SD15, "bundled": bundled_model}, CPU_ESTIMATE


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise TimeLimitError in the main thread if the block lasts longer than `seconds`.

    Uses SIGALRM, which also interrupts system calls; C code returns first.
    """

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise TimeLimitError

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, max(0.1, seconds), _REPEAT_S)
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
