"""Everything worth running on a machine with a GPU, in one command of at most nine minutes: `make gpu`.

    python benchmarks/gpu_session.py [--out FOLDER] [--budget SECONDS] [--small]

Stages: the tests marked `gpu`, the device bench at published sizes, what CUDA graphs save, the cost of LoRAs in a step,
a served mix of requests for a model of Stable Diffusion 1.5's size with random weights. Each has a time limit and a
log; a stage that fails does not stop the next. FOLDER gets the stages' results and `session.json`, which is written
anew after each stage, so that an interrupted session keeps what it has measured.

Without a CUDA device, or with --small, the same stages run at a small size on the CPU. The stages run with this
interpreter and this checkout on PYTHONPATH: Noria's dependencies and pytest have to be there, an installation of Noria
need not be.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

ROOT = pathlib.Path(__file__).resolve().parent.parent
DEFAULT_BUDGET_S = 540.0
_KILL_GRACE_S = 15.0  # a bench that is interrupted writes what it has
_MIN_STAGE_S = 5.0  # a stage with less time left is skipped


@dataclass(frozen=True)
class Stage:
    """One command and the longest time that it may take."""

    name: str
    command: Sequence[str]
    limit_s: float


@dataclass(frozen=True)
class StageResult:
    """How a stage ended: `exit_status` is None if it was skipped for want of time, negative if a signal ended it."""

    name: str
    command: Sequence[str]
    limit_s: float
    seconds: float
    exit_status: int | None
    log: str | None


def plan_stages(out: pathlib.Path, model: pathlib.Path, *, small: bool) -> list[Stage]:
    """The stages in order of their worth, so that a short budget drops the least important ones.

    `model` is where a stage writes the folder of the model that another serves.
    """
    python = sys.executable
    noria = [python, "-m", "noria_bench"]
    pytest = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--timeout", "120"]
    executor_tests = ["tests/engine/diffusion/test_executor.py", "tests/engine/diffusion/test_timing.py"]
    other_tests = [
        "tests/models/diffusion/test_ragged_families.py",
        "tests/models/diffusion/test_z_image.py",
        "tests/models/diffusion/test_graphed_calls.py",
        "tests/engine/encoder/test_sessions.py",
        "benchmarks/tests/device/test_step_timing.py",
    ]
    served = ["--targets", "noria,reference-batched", "--out", str(out / "mixed")]
    if small:
        return [
            Stage("tests", [*pytest, "-k", "cpu", *executor_tests], 150),
            Stage(
                "device",
                [*noria, "device", "--device", "cpu", "--quick", "--budget", "60", "-o", str(out / "device.json")],
                90,
            ),
            Stage("mixed", [*noria, "mixed", "bundled", "--duration", "10", *served], 290),
        ]
    return [
        Stage("tests", [*pytest, "-m", "gpu", *executor_tests, *other_tests], 110),
        Stage("device", [*noria, "device", "--budget", "150", "-o", str(out / "device.json")], 165),
        Stage("graphs", [python, "-m", "noria_bench.micro.graphed_steps", "-o", str(out / "graphs.json")], 75),
        Stage("loras", [python, "-m", "noria_bench.micro.lora_steps", "-o", str(out / "loras.json")], 40),
        Stage("model", [python, "-m", "noria_bench.device.random_folder", str(model)], 30),
        Stage("mixed", [*noria, "mixed", str(model), "--duration", "20", "--dtype", "bfloat16", *served], 150),
    ]


def run_stage(stage: Stage, log: pathlib.Path, left_s: float) -> StageResult:
    """Run one stage within its limit and what is left of the session; its output goes to `log`."""
    limit_s = min(stage.limit_s, left_s)
    if limit_s < _MIN_STAGE_S:
        return StageResult(stage.name, stage.command, stage.limit_s, 0.0, None, None)
    paths = [str(ROOT / "src"), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "PYTHONUNBUFFERED": "1"}
    start_s = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            stage.command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(limit_s)
        except (subprocess.TimeoutExpired, KeyboardInterrupt) as end:
            status = _stop(process)
            if isinstance(end, KeyboardInterrupt):
                raise
    return StageResult(stage.name, stage.command, limit_s, time.monotonic() - start_s, status, log.name)


def _stop(process: subprocess.Popen[bytes]) -> int:
    """Interrupt the stage and all its processes, then kill them; returns the exit status."""
    for number, wait_s in ((signal.SIGINT, _KILL_GRACE_S), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            return process.wait(wait_s)
        except subprocess.TimeoutExpired:
            continue
    return process.wait()


def describe_machine() -> dict[str, object]:
    """The GPU and its driver as nvidia-smi reports them, the processor, the versions that matter, the commit."""

    def output_of(*command: str) -> str | None:
        try:
            result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=30, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return result.stdout.strip() or None

    versions = (
        "import torch, diffusers, transformers as t; print(torch.__version__, diffusers.__version__, t.__version__)"
    )
    return {
        "gpu": output_of("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"),
        "machine": f"{platform.platform()}, {os.cpu_count()} cores",
        "torch_diffusers_transformers": output_of(sys.executable, "-c", versions),
        "commit": output_of("git", "describe", "--always", "--dirty", "--abbrev=12"),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


def has_cuda() -> bool:
    """Whether torch sees a CUDA device."""
    code = "import sys, torch; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the session; returns 1 if a stage failed or was skipped, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    parser.add_argument("--out", type=pathlib.Path, help=f"folder of the results (benchmarks/results/gpu-{today})")
    parser.add_argument(
        "--budget", type=float, default=DEFAULT_BUDGET_S, metavar="SECONDS", help="for all stages (540)"
    )
    parser.add_argument("--small", action="store_true", help="the small size on the CPU, also where there is a GPU")
    arguments = parser.parse_args(argv)
    if not 1 <= arguments.budget <= 86400:
        parser.error(f"--budget is {arguments.budget}; allowed are 1 to 86400 seconds")
    end_s = time.monotonic() + arguments.budget
    small = arguments.small or not has_cuda()
    kind = "gpu-small" if small else "gpu"
    out = (arguments.out or ROOT / "benchmarks" / "results" / f"{kind}-{today}").resolve()
    out.mkdir(parents=True, exist_ok=True)
    session = {"small": small, "budget_s": arguments.budget, **describe_machine()}
    results: list[StageResult] = []
    models = pathlib.Path(tempfile.mkdtemp())
    try:
        for stage in plan_stages(out, models / "sd15-random", small=small):
            print(f"{stage.name}: {' '.join(stage.command)}", flush=True)
            results.append(run_stage(stage, out / f"{stage.name}.log", end_s - time.monotonic()))
            print(f"{stage.name}: exit status {results[-1].exit_status} after {results[-1].seconds:.0f} s", flush=True)
            document = session | {"stages": [asdict(result) for result in results]}
            (out / "session.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    except KeyboardInterrupt:
        return 130
    finally:
        shutil.rmtree(models, ignore_errors=True)
    print(f"results: {out}")
    return 0 if all(result.exit_status == 0 for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
