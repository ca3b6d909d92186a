"""The command `noria bench device` and its options. Imports little: the command line reads it."""

import re
from dataclasses import dataclass, replace

from noria.cli.parser import argument_type
from noria_bench.command_arguments import BenchCommand
from noria_bench.device.schedule import GPU_MODELS
from noria_bench.option_values import names, number, one_of

_DTYPES = ("float32", "bfloat16", "float16", "auto")


@dataclass(frozen=True)
class DeviceOptions:
    """The device, and the measurements that fit `budget_s`."""

    device: str = "auto"
    dtype: str = "auto"
    budget_s: float = 480.0
    models: tuple[str, ...] = GPU_MODELS
    quick: bool = False


def _device(text: str) -> str:
    if not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", text):
        raise ValueError(f"{text!r} is not a device: auto, cpu, cuda or cuda:N")
    return text


_BUDGET = number(1, 86400, "a budget is 1 to 86400 seconds")

COMMAND = BenchCommand(
    "device",
    "the speed of this device, with UNets of published sizes",
    "Measure steps of denoisers at published sizes, and Noria's engine against the reference loop, on one device.",
    DeviceOptions(),
    (
        ("--device", "device", argument_type(_device), "auto (a GPU if there is one), cpu, or cuda:N (auto)"),
        (
            "--dtype",
            "dtype",
            one_of(_DTYPES, "dtypes"),
            f"of {', '.join(_DTYPES)}, which is bfloat16 on a GPU (float16 before Ampere), float32 on a CPU (auto)",
        ),
        ("--budget SECONDS", "budget_s", _BUDGET, "total duration"),
        ("--models NAMES", "models", names(GPU_MODELS, "models"), "on a GPU"),
    ),
    quick=replace(DeviceOptions(), quick=True),
    quick_help="a short version: 2 and 16 rows, nothing compiled",
    has_folder=False,
    module="noria_bench.device.command",
)
