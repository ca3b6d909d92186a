"""Converts a checkpoint to a folder in diffusers format, once.

    FOLDER/DIGEST/            a complete folder; DIGEST is that of the files that it is made of, without
                              noria.json and links to another folder, which are made again when they change
    FOLDER/.DIGEST.partial/   one that is being written

It is written in a process of its own (`python -m noria.models.diffusion.single_file.conversion`), which is interrupted
without harm: a folder is renamed when all of it is there, and what is left of one that is not is deleted at once, or at
the next conversion. One process writes at a time: it has the lock of FOLDER.
"""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NoReturn

import msgspec

from noria.errors import ModelError, NoriaError
from noria.models.diffusion.single_file.checkpoint import Checkpoint
from noria.models.diffusion.single_file.checkpoint_header import read_checkpoint_header
from noria.models.diffusion.single_file.folder_plan import FolderPlan
from noria.models.diffusion.single_file.transformer_file import TransformerFile, read_single_file
from noria.models.diffusion.single_file.transformer_plan import TransformerPlan, choose_parts
from noria.models.files.weights import read_text, short_digest
from noria.observe.terminal_text import escape_for_terminal
from noria.protocol.process_signals import die_with_parent
from noria.storage.private_files import locked_folder, make_own_folder, replace_private_file

_FORMAT = b"2"  # to be changed with what is written
_PROGRESS_S = 5.0
_SPARE_BYTES = 2**24  # configurations and tokenizers


class _Task(msgspec.Struct, frozen=True):
    """The files that are converted; what the process gets."""

    file: str
    vae: str
    parts: tuple[str, ...]
    parent: str  # the folder of folders
    parent_pid: int


def converted_folder(
    file: pathlib.Path, parent: pathlib.Path, vae: str = "", parts: Sequence[str] = ()
) -> pathlib.Path:
    """Return the folder below `parent` that a checkpoint was or is now converted to; `vae` is a file with another VAE.

    `parts` are folders in diffusers format: the file of a transformer takes what it lacks from the first of its family.

    Raises ModelError: a file is damaged or no such model, the disk is full, or the process ended.
    """
    source, plan = _read(file, vae, parts)
    overrides, folder = source.overrides, parent / _digest(plan)
    if not folder.is_dir():
        _run_conversion(_Task(str(file), vae, tuple(parts), str(parent), os.getpid()), folder)
    _refresh(folder, plan.links, overrides)
    return folder


def check_convertible(file: pathlib.Path, vae: str = "", parts: Sequence[str] = ()) -> None:
    """Check by its header that `converted_folder` can make a model of a file. Raises ModelError, also of a refiner."""
    source, _ = _read(file, vae, parts)
    if isinstance(source, Checkpoint) and source.family == "refiner":
        raise ModelError(f"{file}: is a refiner, which is no model of its own; name it in engine.refiners.")


def _run_conversion(task: _Task, folder: pathlib.Path) -> None:
    command = [sys.executable, "-m", "noria.models.diffusion.single_file.conversion"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        try:
            output, _ = child.communicate(msgspec.json.encode(task))
        except BaseException:
            child.terminate()
            raise
    if output:
        raise ModelError(output.decode())
    if child.returncode or not folder.is_dir():
        raise ModelError(
            f"{task.file}: the process that converts it ended with status {child.returncode}; -9 is mostly too little "
            "memory. Start it again."
        )


def _refresh(folder: pathlib.Path, links: Mapping[str, pathlib.Path], overrides: bytes) -> None:
    """Have the folder's links lead to the files of now, and its noria.json be what is beside the file now."""
    kept = folder / "noria.json"
    linked = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_symlink()}
    stale = [path for name, path in linked.items() if name not in links]
    wrong = {name: to for name, to in links.items() if name not in linked or linked[name].readlink() != to}
    if not stale and not wrong and overrides == (read_text(kept) if kept.exists() else b""):
        return
    try:
        with locked_folder(folder.parent, lambda: _report(f"waiting for another process that writes {folder.parent}")):
            for path in stale:
                path.unlink(missing_ok=True)
            for name, target in wrong.items():
                new = folder / f"{name}.{os.getpid()}"
                new.parent.mkdir(exist_ok=True)
                new.symlink_to(target)
                new.rename(folder / name)
            if overrides:
                replace_private_file(kept, overrides)
            else:
                kept.unlink(missing_ok=True)
    except OSError as error:
        raise ModelError(f"{error.filename or kept}: cannot be written: {error.strerror}.") from error


def _read(
    file: pathlib.Path, vae: str, parts: Sequence[str]
) -> tuple[Checkpoint | TransformerFile, FolderPlan | TransformerPlan]:
    """Return what the headers of the files say, and what becomes of them."""
    source = read_single_file(file)
    takes_vae = not (isinstance(source, Checkpoint) and source.family == "refiner")
    other_vae = read_checkpoint_header(pathlib.Path(vae).expanduser()) if vae and takes_vae else None
    if isinstance(source, Checkpoint):
        return source, FolderPlan(source, other_vae)
    folder = choose_parts(source.kind, (pathlib.Path(each).expanduser() for each in parts), file)
    return source, TransformerPlan(source, folder, other_vae)


def _digest(plan: FolderPlan | TransformerPlan) -> str:
    return short_digest(plan.identity(), _FORMAT)


def main() -> int:
    """Convert what standard input names; an error goes to standard output, progress to standard error."""
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=_Task)
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to both processes; the other one ends this one
    die_with_parent(signal.SIGTERM, task.parent_pid)
    try:
        _convert(task, pathlib.Path(task.parent))
    except NoriaError as error:
        sys.stdout.write(error.message)
    except OSError as error:
        where = error.filename or task.parent
        sys.stdout.write(f"{task.file}: cannot be converted: {where}: {error.strerror}.")
    return 0


def _stop(_signum: int, _frame: object) -> NoReturn:
    raise SystemExit(1)


def _convert(task: _Task, parent: pathlib.Path) -> None:
    file = pathlib.Path(task.file)
    source, plan = _read(file, task.vae, task.parts)
    folder = parent / _digest(plan)
    make_own_folder(parent)
    with locked_folder(parent, lambda: _report(f"waiting for another process that converts to {parent}")):
        for partial in parent.glob(".*.partial"):
            shutil.rmtree(partial)
        if folder.is_dir():
            return
        needed, free = plan.num_bytes + _SPARE_BYTES, shutil.disk_usage(parent).free
        if needed > free:
            raise ModelError(
                f"{file}: takes {needed} bytes as a folder; {free} are free in {parent}. Set engine.cache_dir to "
                "another folder."
            )
        _report(f"converting {file.name}, once: {source.describe()}")
        partial = parent / f".{folder.name}.partial"
        partial.mkdir()
        try:
            plan.write(partial, _Progress(file.name, plan.num_bytes).add)
            _sync(partial)
            partial.rename(folder)
        except BaseException:
            shutil.rmtree(partial)
            raise
        _report(f"converted {file.name} to {folder}")


def _sync(folder: pathlib.Path) -> None:
    """Have the disk keep all files of a folder."""
    for file in folder.rglob("*"):
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class _Progress:
    """Reports every few seconds how much is written."""

    def __init__(self, name: str, num_bytes: int) -> None:
        self._name, self._num_bytes, self._num_written = name, num_bytes, 0
        self._next_s = time.monotonic() + _PROGRESS_S

    def add(self, num_bytes: int) -> None:
        self._num_written += num_bytes
        if time.monotonic() >= self._next_s:
            self._next_s += _PROGRESS_S
            _report(f"converting {self._name}: {self._num_written / 1e9:.1f} of {self._num_bytes / 1e9:.1f} GB")


def _report(sentence: str) -> None:
    sys.stderr.write(f"noria: {escape_for_terminal(sentence)}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
