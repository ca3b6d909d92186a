"""Stores the results of jobs as files in an fsspec folder: a local one, or any store by its URL.

    FOLDER/<job>/<attempt>-<k>.png
    FOLDER/<job>/part-<k>-….f32

The file name of an image contains the attempt that wrote it, so a second attempt touches no file of the first. A part
of the results of texts has one name in all attempts: each continues where the last one ended, and two that write the
same part write the same. A job's folder is deleted as a whole, before its record is: this also removes files whose
writer was killed.

Calls block: run them in threads. They raise what the filesystem raises, mostly OSError.
"""

import contextlib
import os
import pathlib
import secrets
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from noria.errors import ConfigError, short_repr
from noria.storage.private_files import make_private_folder


def reject_password(setting: str) -> None:
    """Raise ConfigError if `jobs.results` holds a password, in its URL or in one of a chain of URLs; the message does
    not quote it.
    """
    try:
        has_password = any(urlsplit(url).password is not None for url in setting.split("::"))
    except ValueError as error:  # the value is not quoted: it may hold a password
        raise ConfigError("setting jobs.results is not a URL. Allowed: auto, a folder, s3://BUCKET/FOLDER.") from error
    if has_password:
        raise ConfigError(
            "setting jobs.results holds a password, and process listings would show it. Remove it from the URL, and "
            "set it where the filesystem reads it: in the environment, or in fsspec's configuration (~/.config/fsspec)."
        )


class ResultStore:
    """The files under one folder."""

    def __init__(self, setting: str, data_folder: pathlib.Path) -> None:
        """Open the folder that `jobs.results` names, creating it if needed; `auto` is a folder in `data_folder`.

        Raises ConfigError: the URL holds a password, its filesystem is unknown or needs a package that is not
        installed, or the folder cannot be created.
        """
        from fsspec.core import url_to_fs

        reject_password(setting)
        url = str(data_folder / "results") if setting == "auto" else setting
        try:
            self._filesystem, folder = url_to_fs(url)
            self._folder: str = folder.rstrip("/")
            self._is_local = "file" in _protocols(self._filesystem)
            self._make_folder(self._folder)
        except ImportError as error:
            raise ConfigError(
                f"setting jobs.results is {short_repr(setting)}, which needs a package that is missing: {error}."
            ) from error
        except Exception as error:  # fsspec's filesystems share no base class of errors
            raise ConfigError(
                f"setting jobs.results is {short_repr(setting)}, which cannot be used: {error}. Set data_dir or "
                "jobs.results to a writable folder, or jobs.results to a URL such as s3://bucket/folder."
            ) from error

    def save(self, job_id: str, attempt: int, files: Sequence[bytes], suffix: str) -> list[str]:
        """Write the images of one attempt, each atomically. Returns their names for `read`."""
        names = [f"{attempt}-{index}.{suffix}" for index in range(len(files))]
        for name, file in zip(names, files, strict=True):
            self.save_file(job_id, name, file)
        return names

    def save_file(self, job_id: str, name: str, content: bytes) -> None:
        """Write one file atomically; replaces one of this name."""
        folder = f"{self._folder}/{job_id}"
        self._make_folder(folder)
        if self._is_local:
            _write_atomically(pathlib.Path(folder), name, content)
        else:  # object stores write atomically
            self._filesystem.pipe_file(f"{folder}/{name}", content)

    def names(self, job_id: str) -> list[str]:
        """The names of all files of a job, those of writers that were killed included, in no order."""
        folder = f"{self._folder}/{job_id}"
        self._filesystem.invalidate_cache(folder)  # another process may have written
        try:
            return [str(path).rpartition("/")[2] for path in self._filesystem.ls(folder, detail=False)]
        except FileNotFoundError:
            return []

    def read(self, job_id: str, name: str) -> bytes | None:
        """The content of one file; None if it does not exist."""
        # s3fs looks for it in the last listing of the folder; another process may have written it since.
        self._filesystem.invalidate_cache(f"{self._folder}/{job_id}")
        try:
            content: bytes = self._filesystem.cat_file(f"{self._folder}/{job_id}/{name}")
        except FileNotFoundError:
            return None
        return content

    def discard(self, job_id: str, attempt: int) -> None:
        """Delete the files of one attempt, complete or partial, and the job's folder if it is then empty."""
        folder = f"{self._folder}/{job_id}"
        with contextlib.suppress(FileNotFoundError):
            entries = self.names(job_id)
            attempt_files = [name for name in entries if name.removeprefix(".").startswith(f"{attempt}-")]
            for name in attempt_files:
                with contextlib.suppress(FileNotFoundError):
                    self._filesystem.rm_file(f"{folder}/{name}")
            if len(attempt_files) == len(entries):
                self._filesystem.rmdir(folder)

    def delete(self, job_id: str) -> None:
        """Delete all files of a job."""
        with contextlib.suppress(FileNotFoundError):
            self._filesystem.rm(f"{self._folder}/{job_id}", recursive=True)

    def _make_folder(self, folder: str) -> None:
        if self._is_local:
            make_private_folder(pathlib.Path(folder))
        else:
            self._filesystem.makedirs(folder, exist_ok=True)


def _protocols(filesystem: Any) -> tuple[str, ...]:
    return (filesystem.protocol,) if isinstance(filesystem.protocol, str) else tuple(filesystem.protocol)


def _write_atomically(folder: pathlib.Path, name: str, content: bytes) -> None:
    """Write, fsync and rename: like the database, the results of a succeeded job survive a power failure."""
    temporary = folder / f".{name}.{secrets.token_hex(4)}.part"  # name of this call alone: two may write the same part
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(folder / name)
    for path in (folder, folder.parent):  # fsync the directory entries, too
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
