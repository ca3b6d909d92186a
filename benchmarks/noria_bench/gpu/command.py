"""`make gpu`: the parts of `parts.py`, measured one after the other on a machine with a GPU.

    python -m noria_bench.gpu [--small] [--part A,B] [--after FOLDER] [--out FOLDER] [--budget SECONDS]

Run in a checkout. Noria need not be installed: its dependencies have to be there, in any folder of PYTHONPATH. No
network is needed.
"""

import argparse
import hashlib
import importlib.util
import os
import pathlib
import shlex
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence, Set

from noria.errors import ConfigError
from noria.protocol.process_signals import sigterm_interrupts
from noria_bench.gpu import report
from noria_bench.gpu.checks import Machine, check_machine
from noria_bench.gpu.parts import Models, Part, make_parts
from noria_bench.gpu.session import (
    ROOT,
    PartResult,
    Session,
    digest_of_code,
    done_parts,
    read_session,
    run_parts,
    set_up_environment,
    today,
)
from noria_bench.measurement.provenance import collect_provenance
from noria_bench.running import make_results_folder, status_log

DEFAULT_BUDGET_S = 560.0
_MODELS = pathlib.Path(tempfile.gettempdir()) / "noria-gpu-models"
_IMAGE_MODEL, _TEXT_MODEL = "noria_bench.device.random_folder", "noria_bench.encoders.random_folder"
_log_status = status_log("gpu")


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m noria_bench.gpu", description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--out", type=pathlib.Path, metavar="FOLDER", help="of the results (benchmarks/results/gpu-DATE)")
    after = "skip the parts that this folder of results has for the same code and device; may be repeated"
    add("--after", type=pathlib.Path, action="append", default=[], metavar="FOLDER", help=after)
    add("--part", metavar="A,B", help="only these parts; --list shows their names")
    add("--list", action="store_true", help="print the parts and their seconds, and end")
    budget = f"of all parts together, 1 to 86400 ({DEFAULT_BUDGET_S:.0f}); a part that does not fit is skipped"
    add("--budget", type=float, default=DEFAULT_BUDGET_S, metavar="SECONDS", help=budget)
    add("--small", action="store_true", help="small sizes on the CPU, also where there is a GPU")
    add("--archive", type=pathlib.Path, metavar="FILE", help="a .tar.gz of the results, written anew after each part")
    models = f"for models with random weights, which are made once ({_MODELS})"
    add("--models", type=pathlib.Path, default=_MODELS, metavar="FOLDER", help=models)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns 1 if a part failed or was skipped, 130 after Ctrl-C."""
    parser = make_parser()
    arguments = parser.parse_args(argv)
    if not 1 <= arguments.budget <= 86400:
        parser.error(f"--budget is {arguments.budget:g}; allowed are 1 to 86400 seconds")
    try:
        return _run(arguments, time.monotonic() + arguments.budget)
    except (ConfigError, ValueError) as error:
        parser.error(str(error))


def _run(arguments: argparse.Namespace, end_s: float) -> int:
    small = arguments.small
    out = (arguments.out or ROOT / "benchmarks/results" / f"gpu-{'small-' * small}{today()}").resolve()
    models = _models(arguments.models, small=small)
    parts = make_parts(out, models, small=small)
    chosen = _choose(parts, arguments.part)
    if arguments.list:
        for part in parts:
            print(f"{part.name:20} {part.estimate_s:4.0f} s, at most {part.limit_s:.0f}  {part.title}")
        return 0
    make_results_folder(out)
    if arguments.archive is not None:
        make_results_folder(arguments.archive.resolve().parent, "the folder of --archive,")
    content, before = digest_of_code(), [_read(folder) for folder in arguments.after]
    here = read_session(out)
    machine = _look_at_machine({need for part in chosen for need in part.needs}, small=small)
    gpu = "CPU" if small else str(machine.gpu)
    done = done_parts([*before, *([here] if here else [])], content, gpu, small=small)
    kept = [part for part in here.parts if part.content == content] if here else []
    session = Session(machine.details, collect_provenance(), kept)
    for each in done.values():
        _log_status(f"{each.name}: done on {each.date} on {each.gpu}")
    waiting = [part for part in chosen if part.name not in done]

    def make_result(part: Part) -> PartResult:
        command = shlex.join(["python", *part.arguments])
        return PartResult(part.name, command, content, small, gpu, collect_provenance()["date"])

    def save() -> None:
        report.write_report([*arguments.after, out], out, parts, content, small=small)
        if arguments.archive is not None:
            _archive(out, arguments.archive)

    status = 0
    try:
        with sigterm_interrupts():
            machine.problems |= _make_models(models, {need for part in waiting for need in part.needs}, small=small)
            run_parts(waiting, session, out, make_result, machine.problems, end_s, _log_status, save)
    except KeyboardInterrupt:
        _log_status("interrupted; parts that are done are kept, and are skipped the next time")
        status = 130
    save()
    print((out / "report.md").read_text(encoding="utf-8"), flush=True)
    ended = done_parts([session], content, gpu, small=small) | done
    return status or int(any(part.name not in ended for part in chosen))


def _choose(parts: Sequence[Part], text: str | None) -> list[Part]:
    names = [part.name for part in parts]
    wanted = names if text is None else text.split(",")
    if unknown := [name for name in wanted if name not in names]:
        raise ConfigError(f"--part is {unknown[0]!r}; parts are {', '.join(names)}")
    return [part for part in parts if part.name in wanted]


def _read(folder: pathlib.Path) -> Session:
    found = read_session(folder)
    if found is None:
        raise ConfigError(f"--after {folder} has no session.json; name a folder of results of make gpu")
    return found


def _look_at_machine(needs: Set[str], *, small: bool) -> Machine:
    """Compile the packages that PYTHONPATH names, which takes time once, and check the machine for the parts' needs."""
    folders = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    set_up_environment()
    if folders:
        _log_status("compiling the packages of PYTHONPATH")
        _run_module("compileall", "-q", "-j", "0", *folders)
    machine = check_machine(pathlib.Path(tempfile.gettempdir()), needs, small=small)
    if machine.gpu is None and not small:
        raise ConfigError("torch sees no CUDA device; --small runs all parts on the CPU, to see that they work")
    _log_status(", ".join(f"{name} {value}" for name, value in machine.details.items()) or "nvidia-smi is not there")
    for need, problem in machine.problems.items():
        _log_status(f"parts that need {need} are skipped: {problem}")
    return machine


def _models(folder: pathlib.Path, *, small: bool) -> Models:
    """The folders of the models, named after the code that writes them, or the bundled model."""
    image, encoder = (folder / f"{name.split('.')[1]}-{_digest_of(name)}" for name in (_IMAGE_MODEL, _TEXT_MODEL))
    return Models("bundled", f"{encoder}-tiny") if small else Models(str(image), str(encoder))


def _digest_of(module: str) -> str:
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    return hashlib.sha256(pathlib.Path(spec.origin).read_bytes()).hexdigest()[:8]


def _make_models(models: Models, needs: set[str], *, small: bool) -> dict[str, str]:
    """Make the models with random weights that are not there yet; returns problems by need."""
    made = {}
    if "images" in needs and models.image != "bundled":
        made["images"] = _make_once(models.image, _IMAGE_MODEL)
    if "texts" in needs:
        made["texts"] = _make_once(models.encoder, _TEXT_MODEL, *(["--tiny"] if small else []))
    return {need: "the model with random weights could not be made" for need, is_made in made.items() if not is_made}


def _make_once(folder: str, module: str, *options: str) -> bool:
    """Make a model's folder unless it exists; returns whether it does now."""
    final = pathlib.Path(folder)
    if final.exists():
        return True
    _log_status(f"making random weights in {final}")
    final.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=final.parent) as work:
        made = pathlib.Path(work) / "model"
        if _run_module(module, str(made), *options):
            return False
        made.rename(final)
    return True


def _run_module(name: str, *arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", name, *arguments], cwd=ROOT, check=False).returncode


def _archive(folder: pathlib.Path, file: pathlib.Path) -> None:
    partial = file.with_name(f"{file.name}.partial")
    with tarfile.open(partial, "w:gz") as archive:
        archive.add(folder, arcname=folder.name)
    partial.replace(file)
