"""`noria bench device`: parses the arguments, enforces the time limit, writes a JSON file and prints a short table."""

import argparse
import math
import pathlib
import re
import signal
import sys
import threading
import time
from collections.abc import Collection
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

from noria_bench.device.schedule import GPU_MODELS

if TYPE_CHECKING:
    import torch

    from noria_bench.device.architectures import Architecture
    from noria_bench.device.schedule import InitialEstimate, Measurement

DEFAULT_BUDGET_S = 480.0
_DTYPES = ("auto", "float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `noria bench device`."""
    parser.add_argument(
        "--device", type=_device, default="auto", help="auto (a GPU if there is one), cpu, or cuda:N (auto)"
    )
    parser.add_argument(
        "--dtype",
        choices=_DTYPES,
        default="auto",
        help="auto is bfloat16 on a GPU (float16 before Ampere), float32 on a CPU (auto)",
    )
    parser.add_argument(
        "--budget",
        type=_seconds,
        default=DEFAULT_BUDGET_S,
        metavar="SECONDS",
        help=f"total duration ({DEFAULT_BUDGET_S:.0f})",
    )
    parser.add_argument(
        "--models",
        type=_models,
        default=GPU_MODELS,
        metavar="NAMES",
        help=f"on a GPU, some of {','.join(GPU_MODELS)} (all)",
    )
    parser.add_argument("--quick", action="store_true", help="a short version: 2 and 16 rows, nothing compiled")
    parser.add_argument(
        "-o", "--output", type=pathlib.Path, metavar="FILE", help="JSON file to write, after each measurement"
    )


def _device(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a device: auto, cpu, cuda or cuda:N")
    return text


def _models(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in GPU_MODELS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not a model: {', '.join(GPU_MODELS)}")
    return names


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 1 <= seconds <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 1 to 86400")
    return seconds


def run(arguments: argparse.Namespace) -> int:
    """Measure steps of denoisers at published sizes, and Noria's engine against the reference loop, on one device.

    Returns the exit status.
    """
    end_s = time.monotonic() + arguments.budget
    import torch

    from noria_bench.device.device_report import DeviceReport, table, write
    from noria_bench.device.hardware import choose_device, choose_dtype, describe_device
    from noria_bench.device.runner import DeviceBench
    from noria_bench.measurement.provenance import collect_provenance

    try:
        device = choose_device(arguments.device)
    except ValueError as error:
        print(f"noria: error: {error}", file=sys.stderr)
        return 2
    if device.type == "cuda":
        torch.cuda.set_device(device)
    header = collect_provenance()
    report = DeviceReport(
        header,
        describe_device(device, header["machine"]["cpu"]),
        choose_dtype(arguments.dtype, device),
        arguments.budget,
    )
    started = end_s - arguments.budget

    def save() -> None:
        report.seconds = time.monotonic() - started
        if arguments.output is not None:
            write(report, arguments.output)

    def log_status(text: str) -> None:
        print(f"[{time.monotonic() - started:4.0f} s] {text}", file=sys.stderr, flush=True)

    measurements, architectures, estimate = _select_measurements(
        device, arguments.models, report.notes, quick=arguments.quick
    )
    bench = DeviceBench(device, architectures, estimate, report, save, log_status, end_s)
    status = 0
    time_limit = TimeLimit(end_s - time.monotonic())
    try:
        with time_limit:
            bench.run(measurements)
        report.complete = True
    except KeyboardInterrupt:
        report.complete = time_limit.expired
        status = 0 if time_limit.expired else 130
        report.notes += (
            ["the time limit interrupted a measurement; it and the following ones are missing"]
            if time_limit.expired
            else []
        )
    save()
    print(table(report))
    return status


def _select_measurements(
    device: "torch.device", models: Collection[str], notes: list[str], *, quick: bool
) -> "tuple[tuple[Measurement, ...], dict[str, Architecture], InitialEstimate]":
    from noria_bench.device.architectures import FLUX, SD15, SDXL, Z_IMAGE, bundled_architecture
    from noria_bench.device.schedule import CPU_ESTIMATE, GPU_ESTIMATE, cpu_measurements, gpu_measurements

    if device.type == "cuda":
        architectures = {each.name: each for each in (SD15, SDXL, Z_IMAGE, FLUX)}
        return gpu_measurements(models, quick=quick), architectures, GPU_ESTIMATE
    bundled_model = bundled_architecture()
    notes.append(
        "a CPU: SD1.5's UNet at small sizes, the bundled model at its default size, no SDXL; "
        "use a GPU for 512² and 1024²"
    )
    side_px = bundled_model.config["sample_size"] * bundled_model.latent_scale
    return cpu_measurements(side_px, quick=quick), {"sd15": SD15, "bundled": bundled_model}, CPU_ESTIMATE


class TimeLimit:
    """Raises KeyboardInterrupt in the main thread if the block lasts longer than `seconds`.

    Uses SIGALRM, which also interrupts system calls; background jobs of a shell ignore SIGINT. C code returns first.
    The signal is ignored before the block is entered, since `__exit__` would not run and the thread would signal
    forever.
    """

    # An exception raised in a destructor or a callback is lost, and so is a signal before the block.
    _REPEAT_S = 5.0

    def __init__(self, seconds: float) -> None:
        self.expired = False
        self._seconds, self._done = max(0.1, seconds), threading.Event()
        # Whether the main thread is inside the block.
        self._entered = False
        self._thread = threading.Thread(target=self._send_signals, daemon=True)

    def _send_signals(self) -> None:
        wait_s = self._seconds
        while not self._done.wait(wait_s):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
            wait_s = self._REPEAT_S

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        if self._entered:
            self.expired = True
            raise KeyboardInterrupt

    def __enter__(self) -> None:
        self._previous_handler = signal.signal(signal.SIGALRM, self._on_signal)
        self._thread.start()
        self._entered = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._entered = False
        self._done.set()
        self._thread.join()
        signal.signal(signal.SIGALRM, self._previous_handler)
