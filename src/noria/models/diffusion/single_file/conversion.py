"""Converts a checkpoint to a folder in diffusers format, once.

    FOLDER/DIGEST/            a complete folder; DIGEST is that of the files that it is made of, without
                              noria.json, which is written again when it has changed
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
from typing import NoReturn

import msgspec

from noria.errors import ModelError, NoriaError
from noria.models.diffusion.single_file.checkpoint import Checkpoint, read_checkpoint
from noria.models.diffusion.single_file.checkpoint_header import (
    CheckpointHeader,
    content_digest,
    read_checkpoint_header,
)
from noria.models.diffusion.single_file.folder_plan import FolderPlan
from noria.models.weights import read_text, short_digest
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
    parent: str  # the folder of folders
    parent_pid: int


def converted_folder(file: pathlib.Path, parent: pathlib.Path, vae: str = "") -> pathlib.Path:
    """Return the folder below `parent` that a checkpoint was or is now converted to; `vae` is a file with another VAE.

    Raises ModelError: a file is damaged or no such model, the disk is full, or the process ended.
    """
    checkpoint, other_vae = _read(file, vae)
    folder = parent / _digest(checkpoint, other_vae)
    if not folder.is_dir():
        _run_conversion(file, parent, vae, folder)
    _refresh_overrides(folder, checkpoint.overrides)
    return folder


def _run_conversion(file: pathlib.Path, parent: pathlib.Path, vae: str, folder: pathlib.Path) -> None:
    task = _Task(str(file), vae, str(parent), os.getpid())
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
            f"{file}: the process that converts it ended with status {child.returncode}; -9 is mostly too little "
            "memory. Start it again."
        )


def _refresh_overrides(folder: pathlib.Path, overrides: bytes) -> None:
    """Have the folder's noria.json be what is beside the file now."""
    kept = folder / "noria.json"
    if overrides == (read_text(kept) if kept.exists() else b""):
        return
    waiting = f"waiting for another process that converts to {folder.parent}"
    try:
        with locked_folder(folder.parent, lambda: _report(waiting)):
            if overrides:
                replace_private_file(kept, overrides)
            else:
                kept.unlink(missing_ok=True)
    except OSError as error:
        raise ModelError(f"{kept}: cannot be written: {error.strerror}.") from error


def _read(file: pathlib.Path, vae: str) -> tuple[Checkpoint, CheckpointHeader | None]:
    """Return what the headers of the files say, having checked that they can be converted."""
    checkpoint = read_checkpoint(file)
    other_vae = (
        read_checkpoint_header(pathlib.Path(vae).expanduser()) if vae and checkpoint.family != "refiner" else None
    )
    FolderPlan(checkpoint, other_vae)
    return checkpoint, other_vae


def _digest(checkpoint: Checkpoint, vae: CheckpointHeader | None) -> str:
    headers = [checkpoint.header, *([] if vae is None else [vae])]
    settings = (checkpoint.family, checkpoint.predicts_v, checkpoint.has_zero_snr, checkpoint.side_px)
    return short_digest([repr(settings).encode(), content_digest(headers).encode()], _FORMAT)


def main() -> int:
    """Convert what standard input names; an error goes to standard output, progress to standard error."""
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=_Task)
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal sends it to both processes; the other one ends this one
    die_with_parent(signal.SIGTERM, task.parent_pid)
    try:
        _convert(pathlib.Path(task.file), pathlib.Path(task.parent), task.vae)
    except NoriaError as error:
        sys.stdout.write(error.message)
    except OSError as error:
        where = error.filename or task.parent
        sys.stdout.write(f"{task.file}: cannot be converted: {where}: {error.strerror}.")
    return 0


def _stop(_signum: int, _frame: object) -> NoReturn:
    raise SystemExit(1)


def _convert(file: pathlib.Path, parent: pathlib.Path, vae: str) -> None:
    checkpoint, other_vae = _read(file, vae)
    folder = parent / _digest(checkpoint, other_vae)
    make_own_folder(parent)
    with locked_folder(parent, lambda: _report(f"waiting for another process that converts to {parent}")):
        for partial in parent.glob(".*.partial"):
            shutil.rmtree(partial)
        if folder.is_dir():
            return
        plan = FolderPlan(checkpoint, other_vae)
        needed, free = plan.num_bytes + _SPARE_BYTES, shutil.disk_usage(parent).free
        if needed > free:
            raise ModelError(
                f"{file}: takes {needed} bytes as a folder; {free} are free in {parent}. Set engine.cache_dir to "
                "another folder."
            )
        _report(f"converting {file.name}, once: {checkpoint.describe()}")
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
