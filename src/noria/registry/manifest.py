"""The content of a model folder: the SHA-256 of each file, and one digest of all.

A manifest is what `sha256sum` prints of the files, sorted by path, so anyone can make and check it:

    cd FOLDER && find -L . -type f ! -path '*/.*' ! -path ./noria-lineage.jsonl -printf '%P\\0' \\
      | LC_ALL=C sort -z | xargs -0 sha256sum

and its own SHA-256 is the digest of the folder. Left out are hidden files and folders, which tools add, and the lineage
at the top, which names the digest of the rest.
"""

import hashlib
import os
import pathlib
import re
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from noria.errors import ModelError, short_repr

LINEAGE_FILE = "noria-lineage.jsonl"
"""At the top of a model folder: the OpenLineage events of the runs that made the model, one a line."""

OnRead = Callable[[int, int], None]
"""Called a few times a second, with the bytes that were read so far and all that there are."""

_NUM_THREADS = 4  # hashing releases the interpreter's lock
_CHUNK_BYTES = 1_048_576
_REPORT_INTERVAL_S = 0.25
_UNLISTABLE = re.compile("[\n\r\\\\\ud800-\udfff]")  # sha256sum would escape them; surrogates are no UTF-8


@dataclass(frozen=True)
class Manifest:
    """The content of a folder."""

    text: str
    size_bytes: int  # size of all files

    @property
    def digest(self) -> str:
        """The digest of the folder: `sha256:` and 64 hexadecimal digits."""
        return format_digest(hashlib.sha256(self.text.encode()))

    @property
    def digests(self) -> dict[str, str]:
        """The hexadecimal SHA-256 of each file, by its path in the folder."""
        return parse(self.text)


def format_digest(digest: "hashlib._Hash") -> str:
    """Return `sha256:` and the hexadecimal digits."""
    return f"sha256:{digest.hexdigest()}"


def parse(manifest: str) -> dict[str, str]:
    """Return the hexadecimal SHA-256 of each file of a manifest, by its path in the folder."""
    return {path: digest for digest, _, path in (line.partition("  ") for line in manifest.split("\n") if line)}


def report_nothing(num_read: int, num_bytes: int) -> None:
    """Do nothing."""


def read_manifest(folder: pathlib.Path, on_read: OnRead = report_nothing) -> Manifest:
    """Read all files of a folder. An interruption ends at the next MiB of each thread.

    Raises ModelError: it has no files, a file cannot be read or listed, or it has something that is neither file nor
    folder.
    """
    files = sorted(_files(folder), key=lambda path: path.encode())
    if not files:
        raise ModelError(f"{folder}: has no files.")
    read = _Reading().read_all([folder / path for path in files], on_read)
    lines = [f"{digest}  {path}\n" for path, (digest, _) in zip(files, read, strict=True)]
    return Manifest("".join(lines), sum(size_bytes for _, size_bytes in read))


def differences(manifest: str, folder: pathlib.Path, on_read: OnRead = report_nothing) -> list[str]:
    """Return the paths of files that are missing, added or changed in a folder since its manifest.

    Raises ModelError: as `read_manifest`.
    """
    before, now = parse(manifest), read_manifest(folder, on_read).digests
    return sorted(path for path in before.keys() | now.keys() if before.get(path) != now.get(path))


def _files(folder: pathlib.Path, inside: str = "") -> Iterator[str]:
    """Yield the paths of the files that a manifest lists, relative to `folder`."""
    try:
        entries = sorted((folder / inside).iterdir())
    except OSError as error:
        raise ModelError(f"{folder / inside}: cannot be read: {error.strerror}.") from error
    for entry in entries:
        path = inside + entry.name
        if entry.name.startswith(".") or path == LINEAGE_FILE:
            continue
        if entry.is_dir():
            if entry.is_symlink():
                raise ModelError(f"{entry}: a symbolic link to a folder. Put the folder itself here, or remove it.")
            yield from _files(folder, f"{path}/")
        elif _UNLISTABLE.search(path):
            raise ModelError(
                f"{folder}: has a file named {short_repr(path)}; allowed is UTF-8 without line breaks and backslashes."
            )
        else:
            yield path


class _Reading:
    """Files that are read at the same time."""

    def __init__(self) -> None:
        self._is_stopped = False
        self._lock, self._num_read = threading.Lock(), 0

    def read_all(self, files: Sequence[pathlib.Path], on_read: OnRead) -> list[tuple[str, int]]:
        """Return each file's SHA-256 in hexadecimal digits, and its size in bytes. Raises ModelError."""
        num_bytes = sum(_size_bytes(file) for file in files)
        threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="hash")
        try:
            reading = [threads.submit(self._read, file) for file in files]
            while not _is_over(reading):
                on_read(self._num_read, num_bytes)
            return [each.result() for each in reading]
        finally:  # also after an error of one file, and at an interruption: nobody waits for the others
            self._is_stopped = True
            threads.shutdown(cancel_futures=True)

    def _read(self, file: pathlib.Path) -> tuple[str, int]:
        digest, size_bytes, chunk = hashlib.sha256(), 0, memoryview(bytearray(_CHUNK_BYTES))
        try:
            with open(file, "rb", buffering=0, opener=_open_at_once) as opened:
                _check_regular(file, os.fstat(opened.fileno()))  # it may be another than when its size was read
                while (num := opened.readinto(chunk)) and not self._is_stopped:
                    digest.update(chunk[:num])
                    size_bytes += num
                    with self._lock:
                        self._num_read += num
        except OSError as error:
            raise _unreadable(file, error) from error
        return digest.hexdigest(), size_bytes


def _is_over(reading: "list[Future[tuple[str, int]]]") -> bool:
    """Wait a moment; return whether all files are read. Raises the error of one that cannot be."""
    done, rest = wait(reading, _REPORT_INTERVAL_S, FIRST_EXCEPTION)
    for each in done:
        each.result()
    return not rest


def _size_bytes(file: pathlib.Path) -> int:
    try:
        status = file.stat()
    except OSError as error:
        raise _unreadable(file, error) from error
    _check_regular(file, status)
    return status.st_size


def _check_regular(file: pathlib.Path, status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise ModelError(f"{file}: not a regular file. Remove it from the folder.")


def _open_at_once(path: str, flags: int) -> int:
    """Open a file, a named pipe that nobody writes to included, which `open` would wait for."""
    return os.open(path, flags | os.O_NONBLOCK)


def _unreadable(file: pathlib.Path, error: OSError) -> ModelError:
    return ModelError(f"{file}: cannot be read: {error.strerror}.")
