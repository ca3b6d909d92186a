"""The content of a model folder: the SHA-256 of each file, and one digest of all.

A manifest is what `sha256sum` prints of the files, sorted by path, so anyone can make and check it:

    cd FOLDER && find -L . -type f ! -path '*/.*' ! -path ./noria-lineage.jsonl -printf '%P\\0' \\
      | LC_ALL=C sort -z | xargs -0 sha256sum

and its own SHA-256 is the digest of the folder. Left out are hidden files and folders, which tools add, and the lineage
at the top, which names the digest of the rest.
"""

import hashlib
import pathlib
import re
import stat
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from noria.errors import ModelError, short_repr

LINEAGE_FILE = "noria-lineage.jsonl"
"""At the top of a model folder: the OpenLineage events of the runs that made the model, one a line."""

_NUM_THREADS = 4  # hashing releases the interpreter's lock
_UNLISTABLE = re.compile(r"[\n\r\\]")  # sha256sum would escape them


@dataclass(frozen=True)
class Manifest:
    """The content of a folder."""

    text: str
    size_bytes: int  # of all files

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


def read_manifest(folder: pathlib.Path) -> Manifest:
    """Read all files of a folder.

    Raises:
        ModelError: it has no files, a file cannot be read or listed, or it has something that is neither file nor
            folder.

    """
    files = sorted(_files(folder), key=lambda path: path.encode())
    if not files:
        raise ModelError(f"{folder}: has no files.")
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        read = list(threads.map(lambda path: _read(folder / path), files))
    lines = [f"{digest}  {path}\n" for path, (digest, _) in zip(files, read, strict=True)]
    return Manifest("".join(lines), sum(size_bytes for _, size_bytes in read))


def differences(manifest: str, folder: pathlib.Path) -> list[str]:
    """Return the paths of files that are missing, added or changed in a folder since its manifest.

    Raises:
        ModelError: as `read_manifest`.

    """
    before, now = parse(manifest), read_manifest(folder).digests
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
        elif _UNLISTABLE.search(path) or not _is_utf8(path):
            raise ModelError(
                f"{folder}: has a file named {short_repr(path)}; allowed is UTF-8 without line breaks and backslashes."
            )
        else:
            yield path


def _is_utf8(path: str) -> bool:
    return not any("\ud800" <= letter <= "\udfff" for letter in path)


def _read(file: pathlib.Path) -> tuple[str, int]:
    """Return a file's SHA-256 in hexadecimal digits, and its size in bytes."""
    try:
        if not stat.S_ISREG(file.stat().st_mode):  # opening a named pipe would block
            raise ModelError(f"{file}: not a regular file. Remove it from the folder.")
        with file.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest(), opened.tell()
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}.") from error
