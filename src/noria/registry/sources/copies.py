"""Copies of remote models in the data folder. Blocks.

    models/DIGEST/            a complete copy; DIGEST is that of the source's listing
    models/.DIGEST.partial/   one that is being made

A file is renamed when all of it is there, and so is the folder. A process that is killed leaves what it has, and the
next one that copies the same completes it. One process copies at a time: it has the lock of `models`.
"""

import hashlib
import os
import pathlib
import shutil
from collections.abc import Callable

from noria.errors import ModelError
from noria.registry.sources.remote_folder import RemoteFile, RemoteFolder, read_chunks
from noria.storage.private_files import locked_folder, make_private_folder


def copy_model(
    model: RemoteFolder,
    models_folder: pathlib.Path,
    report: Callable[[str], None],
    check: Callable[[pathlib.Path], object],
) -> pathlib.Path:
    """Return the folder of a complete copy, which is made or completed if there is none; `report` says so.

    What `check` raises ModelError for is deleted.

    Raises ModelError: a file cannot be read, or has another size or digest than its listing; the disk is full; `check`
    rejects the copy.
    """
    copy, partial = models_folder / model.digest, models_folder / f".{model.digest}.partial"
    try:
        if copy.is_dir():
            return copy
        make_private_folder(models_folder)
        with locked_folder(
            models_folder, lambda: report(f"waiting for another process that copies to {models_folder}")
        ):
            if not copy.is_dir():
                make_private_folder(partial)
                _complete(model, partial, report)
                _check(model, partial, check)
                partial.rename(copy)
    except OSError as error:
        raise ModelError(f"{models_folder} cannot be written: {error.strerror}.") from error
    return copy


def _complete(model: RemoteFolder, partial: pathlib.Path, report: Callable[[str], None]) -> None:
    missing = [file for file in model.files if not (partial / file.path).exists()]
    missing_bytes, free_bytes = sum(file.size_bytes for file in missing), shutil.disk_usage(partial).free
    if missing_bytes > free_bytes:
        raise ModelError(f"{model.url} takes {missing_bytes} bytes more; {free_bytes} are free in {partial.parent}.")
    report(
        f"copying {model.url} to {partial.parent}: {len(missing)} of {len(model.files)} files, {missing_bytes} of "
        f"{model.size_bytes} bytes"
    )
    for number, file in enumerate(missing, 1):
        report(f"{number} of {len(missing)}: {file.path}, {file.size_bytes} bytes")
        _copy_file(model, file, partial)


def _check(model: RemoteFolder, folder: pathlib.Path, check: Callable[[pathlib.Path], object]) -> None:
    try:
        check(folder)
    except ModelError as error:
        shutil.rmtree(folder)
        raise ModelError(str(error).replace(str(folder), model.url)) from error


def _copy_file(model: RemoteFolder, file: RemoteFile, folder: pathlib.Path) -> None:
    target = folder / file.path
    make_private_folder(target.parent)
    new = target.with_name(f".{target.name}.part")
    digest, size_bytes = hashlib.sha256(), 0
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as opened:
        for chunk in read_chunks(model, file.path):
            size_bytes += len(chunk)
            if size_bytes > file.size_bytes:
                break
            digest.update(chunk)
            opened.write(chunk)
        opened.flush()
        os.fsync(opened.fileno())
    if size_bytes != file.size_bytes:
        raise ModelError(
            f"{model.url}: {file.path} was listed with {file.size_bytes} bytes and has "
            f"{'more' if size_bytes > file.size_bytes else size_bytes}. Run the same command again."
        )
    if file.sha256 is not None and digest.hexdigest() != file.sha256:
        raise ModelError(
            f"{model.url}: {file.path} was listed with the SHA-256 {file.sha256} and has {digest.hexdigest()}. Run the "
            "same command again."
        )
    new.rename(target)
