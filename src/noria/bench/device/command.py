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

    from noria.bench.device.architectures import Architecture
    from noria.bench.device.plan import Guess, Part

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

    from noria.bench.device.bench import DeviceBench
    from noria.bench.device.hardware import choose_device, choose_dtype, describe
    from noria.bench.device.report import Report, table, write
    from noria.bench.machine import provenance

    try:
        device = choose_device(arguments.device)
    except ValueError as error:
        print(f"noria: error: {error}", file=sys.stderr)
        return 2
    if device.type == "cuda":
        torch.cuda.set_device(device)
    about = provenance()
    report = Report(
        about, describe(device, about["machine"]["cpu"]), choose_dtype(arguments.dtype, device), arguments.budget
    )
    started = end_s - arguments.budget

    def save() -> None:
        report.seconds = time.monotonic() - started
        if arguments.output is not None:
            write(report, arguments.output)

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:4.0f} s] {text}", file=sys.stderr, flush=True)

    parts, architectures, guess = _what_to_do(device, report.notes, quick=arguments.quick)
    bench = DeviceBench(device, architectures, guess, report, save, say, end_s)
    status = 0
    alarm = Alarm(end_s - time.monotonic())
    try:
        with alarm:
            bench.run(parts)
        report.complete = True
    except KeyboardInterrupt:
        report.complete = alarm.rang
        status = 0 if alarm.rang else 130
        report.notes += ["the time was over in the middle of a part; it and the rest are missing"] if alarm.rang else []
    save()
    print(table(report))
    return status


def _what_to_do(
    device: "torch.device", notes: list[str], *, quick: bool
) -> "tuple[tuple[Part, ...], dict[str, Architecture], Guess]":
    from noria.bench.device.architectures import SD15, SDXL, bundled
    from noria.bench.device.plan import CPU_GUESS, GPU_GUESS, cpu_parts, gpu_parts

    if device.type == "cuda":
        return gpu_parts(quick=quick), {"sd15": SD15, "sdxl": SDXL}, GPU_GUESS
    small = bundled()
    notes.append(
        "a CPU: SD1.5's UNet at small sizes, the bundled model at its own, no SDXL; run it on a GPU for 512² and 1024²"
    )
    side_px = small.config["sample_size"] * small.latent_scale
    return cpu_parts(side_px, quick=quick), {"sd15": SD15, "bundled": small}, CPU_GUESS


class Alarm:
    """Interrupts the main thread, as Ctrl-C does, when `seconds` are over before the block is.

    By a signal of its own: it ends a wait in a system call too, and a shell's background jobs ignore Ctrl-C's. Code in C is left first.
    It never interrupts its own setting: a block that was not entered is not left either, and the alarm would ring for ever.
    """

    _AGAIN_S = 5.0  # what it raises in a destructor or a callback is lost, and so is what rings before the block

    def __init__(self, seconds: float) -> None:
        self.rang = False
        self._seconds, self._over = max(0.1, seconds), threading.Event()
        self._within = False  # the block, as far as the main thread has come
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _watch(self) -> None:
        patience_s = self._seconds
        while not self._over.wait(patience_s):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
            patience_s = self._AGAIN_S

    def _ring(self, _number: int, _frame: FrameType | None) -> None:
        if self._within:
            self.rang = True
            raise KeyboardInterrupt

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGALRM, self._ring)
        self._thread.start()
        self._within = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._within = False
        self._over.set()
        self._thread.join()
        signal.signal(signal.SIGALRM, self._before)
