"""The checks before the parts: in some seconds they find what would fail a part after a minute.

What parts import is imported, in a process of its own; Triton serves a model that imports torch.
"""

import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Set
from dataclasses import dataclass, field
from typing import Any

from noria.errors import ConfigError
from noria.testing.server import running_process
from noria_bench.targets.environments import python_of
from noria_bench.targets.triton import find_triton

IMPORTS: dict[str, tuple[str, ...]] = {
    "images": (
        "noria.frontend.app",
        "noria.engine.process",
        "noria_bench.targets.reference.reference_server",
        "noria_bench.load.trace_client",
        "noria_bench.reports.writer",
        "noria_bench.targets.pipeline",
        "diffusers.pipelines.stable_diffusion",
    ),
    "texts": (
        "noria.frontend.app",
        "noria.engine.process",
        "noria_bench.encoders.bench",
        "noria_bench.encoders.servers.fastapi_app",
        "noria_bench.encoders.servers.torch_encoder",
        "uvloop",
        "httptools",
    ),
    "denoisers": ("noria_bench.device.runner", "diffusers.models"),
    "tests": ("pytest", "pytest_timeout", "diffusers", "transformers"),
}
"""Modules that the parts of each need import."""

_MIN_FREE_BYTES = 10 * 2**30
_GPU_FIELDS = "name,driver_version,memory.total,memory.used,clocks.sm,clocks.max.sm,temperature.gpu,power.limit"
_IMPORT_CODE = """
import importlib, json, sys
problems = {}
for need, names in json.loads(sys.argv[1]).items():
    for name in names:
        try:
            importlib.import_module(name)
        except BaseException as error:
            problems[need] = f"{name} cannot be imported: {type(error).__name__}: {error}"
            break
try:
    import torch
    device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
except Exception:
    device = None
print(json.dumps([problems, device]))
"""


@dataclass
class Machine:
    """The GPU that torch sees (None: none), how nvidia-smi describes it, and by need why parts cannot run."""

    gpu: str | None
    details: dict[str, str]
    problems: dict[str, str] = field(default_factory=dict)


def check_machine(folder: pathlib.Path, needs: Set[str], *, small: bool) -> Machine:
    """Look at the device, at the space at `folder`, and at what is needed of imports, Triton and Infinity."""
    problems, gpu = _try_imports({need: names for need, names in IMPORTS.items() if need in needs})
    machine = Machine(gpu, _describe_gpu(), problems)
    for need, find_problem in (("triton", _triton_problem), ("infinity", _infinity_problem)):
        if need in needs and (problem := find_problem()) is not None:
            machine.problems[need] = problem
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < _MIN_FREE_BYTES and not small:
        problem = f"{folder} has {free_bytes / 2**30:.1f} GiB free; random weights and results need 10"
        machine.problems = dict.fromkeys(needs, problem)
    return machine


def _try_imports(imports: dict[str, tuple[str, ...]]) -> tuple[dict[str, str], str | None]:
    command = [sys.executable, "-c", _IMPORT_CODE, json.dumps(imports)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    try:
        found: list[Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        problem = f"the process that imports them ended with status {done.returncode}; its stderr is above"
        return dict.fromkeys(imports, problem), None
    return found[0], found[1]


def _describe_gpu() -> dict[str, str]:
    """Empty without nvidia-smi."""
    command = ["nvidia-smi", f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return {}
    values = [value.strip() for value in found.stdout.splitlines()[0].split(",")]
    return dict(zip(_GPU_FIELDS.split(","), values, strict=False))


def _infinity_problem() -> str | None:
    try:
        python_of("infinity")
    except ConfigError as error:
        return str(error)
    return None


def _triton_problem() -> str | None:
    """Why Triton cannot serve here; None if it can."""
    try:
        find_triton()
    except ConfigError as error:
        return str(error)
    with tempfile.NamedTemporaryFile(prefix="noria-triton-", suffix=".log") as log:

        def command(port: int) -> list[str]:
            return [sys.executable, "-m", "noria_bench.gpu.triton_probe", str(port)]

        try:
            with running_process(command, log=pathlib.Path(log.name), ready_path="/v2/health/ready"):
                return None
        except RuntimeError:
            lines = pathlib.Path(log.name).read_text(encoding="utf-8", errors="replace").splitlines()
            reasons = [line for line in lines if "rror" in line] or lines
            return f"Triton does not serve a model that imports torch: {' / '.join(reasons)[:600]}"
