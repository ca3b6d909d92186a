"""The images of jobs, as files in a folder that fsspec reaches: a local one, or any store by its URL.

    FOLDER/<job>/<attempt>-<k>.png

A file's name holds the attempt that drew it, so whoever draws a job a second time touches no file of the first. A job's folder goes
as a whole, before its record does: so a file whose writer was killed goes with it, and none is left behind.

Calls block: they belong into threads. They raise what the filesystem raises, mostly OSError.
"""

import contextlib
import os
import pathlib
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from noria.errors import ConfigError, short_repr


def refuse_password(setting: str) -> None:
    """Raise ConfigError, without showing it, for a `jobs.results` with a password in its URL, or in one of a chain of URLs."""
    try:
        has_password = any(urlsplit(url).password is not None for url in setting.split("::"))
    except ValueError as error:  # not shown: it may hold a password
        raise ConfigError("setting jobs.results is not a URL. Allowed: auto, a folder, s3://BUCKET/FOLDER.") from error
    if has_password:
        raise ConfigError(
            "setting jobs.results holds a password, and process listings would show it. Leave it out of the URL, and put it where its "
            "filesystem looks: into the environment, or fsspec's configuration (~/.config/fsspec)."
        )


class ResultStore:
    """The files under one folder."""

    def __init__(self, setting: str, data_folder: pathlib.Path) -> None:
        """Open, and make, the folder that `jobs.results` names; `data_folder` is where `auto` is.

        Raises:
            ConfigError: the URL holds a password, its filesystem is unknown, needs a package that is not installed, or the folder cannot be made.

        """
        from fsspec.core import url_to_fs

        refuse_password(setting)
        url = str(data_folder / "results") if setting == "auto" else setting
        try:
            self._filesystem, folder = url_to_fs(url)
            self._folder: str = folder.rstrip("/")
            self._filesystem.makedirs(self._folder, exist_ok=True)
        except ImportError as error:
            raise ConfigError(
                f"setting jobs.results is {short_repr(setting)}, which needs a package that is missing: {error}."
            ) from error
        except Exception as error:  # fsspec's filesystems share no error of their own
            raise ConfigError(
                f"setting jobs.results is {short_repr(setting)}, which cannot be used: {error}. Set data_dir or jobs.results to a folder that can "
                "be written, or to a URL such as s3://bucket/folder."
            ) from error
        self._is_local = "file" in _protocols(self._filesystem)

    def save(self, job_id: str, attempt: int, files: Sequence[bytes], suffix: str) -> list[str]:
        """Write the images of one attempt; each is there as a whole or not at all. Returns their names for `read`."""
        names = [f"{attempt}-{index}.{suffix}" for index in range(len(files))]
        folder = f"{self._folder}/{job_id}"
        self._filesystem.makedirs(folder, exist_ok=True)
        for name, file in zip(names, files, strict=True):
            if self._is_local:
                _write_atomically(pathlib.Path(folder), name, file)
            else:  # stores of objects show a file when it is complete
                self._filesystem.pipe_file(f"{folder}/{name}", file)
        return names

    def read(self, job_id: str, name: str) -> bytes | None:
        """One file; None if it is not there."""
        try:
            content: bytes = self._filesystem.cat_file(f"{self._folder}/{job_id}/{name}")
        except FileNotFoundError:
            return None
        return content

    def discard(self, job_id: str, attempt: int) -> None:
        """Delete what one attempt has written, complete or not; and the folder, if nothing else is in it."""
        folder = f"{self._folder}/{job_id}"
        with contextlib.suppress(FileNotFoundError):
            entries = [str(path).rpartition("/")[2] for path in self._filesystem.ls(folder, detail=False)]
            attempt_files = [name for name in entries if name.removeprefix(".").startswith(f"{attempt}-")]
            for name in attempt_files:
                with contextlib.suppress(FileNotFoundError):
                    self._filesystem.rm_file(f"{folder}/{name}")
            if len(attempt_files) == len(entries):
                self._filesystem.rmdir(folder)

    def delete(self, job_id: str) -> None:
        """Delete everything of a job."""
        with contextlib.suppress(FileNotFoundError):
            self._filesystem.rm(f"{self._folder}/{job_id}", recursive=True)


def _protocols(filesystem: Any) -> tuple[str, ...]:
    return (filesystem.protocol,) if isinstance(filesystem.protocol, str) else tuple(filesystem.protocol)


def _write_atomically(folder: pathlib.Path, name: str, content: bytes) -> None:
    """As the database does, this waits for the disk: a job that has succeeded has its images after a power cut, too."""
    temporary = folder / f".{name}.part"
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(folder / name)
    for path in (folder, folder.parent):  # the names, too
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
