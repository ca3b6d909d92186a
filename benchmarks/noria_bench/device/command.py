"""The command: arguments in, a JSON file and a short table out; the time that it may take is kept even where a prediction was wrong."""

import argparse
import math
import pathlib
import re
import signal
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from noria_bench.device.architectures import Architecture
    from noria_bench.device.schedule import InitialEstimate, Measurement

DEFAULT_BUDGET_S = 480.0
_DTYPES = ("auto", "float32", "bfloat16", "float16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What `noria bench device` takes."""
    parser.add_argument(
        "--device", type=_device, default="auto", help="auto (the GPU if there is one), cpu, or cuda:N (auto)"
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
        help=f"that it may take, all in all ({DEFAULT_BUDGET_S:.0f})",
    )
    parser.add_argument("--quick", action="store_true", help="a sample: 2 and 16 rows, nothing compiled")
    parser.add_argument(
        "-o", "--output", type=pathlib.Path, metavar="FILE", help="JSON file to write, again after each part"
    )


def _device(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no device: auto, cpu, cuda or cuda:N")
    return text


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 1 <= seconds <= 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds: 1 to 86400")
    return seconds


def run(arguments: argparse.Namespace) -> int:
    """Measure UNet steps at true size, and the seed's loop against the wheel, on one device; returns the exit status, 130 after Ctrl-C."""
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

    measurements, architectures, estimate = _select_measurements(device, report.notes, quick=arguments.quick)
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
            ["the time was over in the middle of a part; it and the rest are missing"] if time_limit.expired else []
        )
    save()
    print(table(report))
    return status


def _select_measurements(
    device: "torch.device", notes: list[str], *, quick: bool
) -> "tuple[tuple[Measurement, ...], dict[str, Architecture], InitialEstimate]":
    from noria_bench.device.architectures import SD15, SDXL, bundled_architecture
    from noria_bench.device.schedule import CPU_ESTIMATE, GPU_ESTIMATE, cpu_measurements, gpu_measurements

    if device.type == "cuda":
        return gpu_measurements(quick=quick), {"sd15": SD15, "sdxl": SDXL}, GPU_ESTIMATE
    bundled_model = bundled_architecture()
    notes.append(
        "a CPU: SD1.5's UNet at small sizes, the bundled model at its own, no SDXL; run it on a GPU for 512² and 1024²"
    )
    side_px = bundled_model.config["sample_size"] * bundled_model.latent_scale
    return cpu_measurements(side_px, quick=quick), {"sd15": SD15, "bundled": bundled_model}, CPU_ESTIMATE


class TimeLimit:
    """Interrupts the main thread, as Ctrl-C does, when `seconds` are over before the block is.

    By a signal of its own: it ends a wait in a system call too, and a shell's background jobs ignore Ctrl-C's. Code in C is left first.
    It never interrupts its own setting: a block that was not entered is not left either, and the alarm would ring for ever.
    """

    _REPEAT_S = 5.0  # what it raises in a destructor or a callback is lost, and so is what rings before the block

    def __init__(self, seconds: float) -> None:
        self.expired = False
        self._seconds, self._done = max(0.1, seconds), threading.Event()
        self._entered = False  # the block, as far as the main thread has come
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
