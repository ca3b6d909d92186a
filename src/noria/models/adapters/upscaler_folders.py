"""The folders of upscalers of pixels, ESRGAN and its kin, that requests can name: their files. No torch.

An upscaler's name is that of its file, without the suffix; those of filters come first. Folders are listed when a
request asks for an upscaler; what a file contains is checked when an engine loads it.
"""

import functools
import os
import pathlib
from collections.abc import Sequence

from noria.errors import InvalidField, ModelError, short_list, short_repr
from noria.extras import check_installed
from noria.models.adapters.folder_entries import FolderEntries
from noria.models.files.weights import file_size_bytes, short_digest
from noria.protocol.diffusion import PixelUpscaler

LANCZOS, NEAREST = "Lanczos", "Nearest"
FILTERS = (LANCZOS, NEAREST)
"""Upscalers without a file."""

PACKAGE, EXTRA = "spandrel", "upscalers"
_SUFFIXES = (".safetensors", ".pth", ".pt")
_MAX_NAME_CHARS = 128
_MAX_NAMES_IN_MESSAGES = 50
_SAMPLED_BYTES = 2**20  # at both ends, where .safetensors and .pth list their tensors


class UpscalerFolders(FolderEntries):
    """The setting `engine.upscalers`."""

    setting = "upscalers"
    forms = "FOLDER"

    def __init__(self, entries: Sequence[str]) -> None:
        self._folders = [(None, pathlib.Path(entry)) for entry in entries]  # for all models

    def check_folders(self) -> None:
        """Raise ConfigError if a folder does not exist, MissingExtra if what reads the files is not installed."""
        super().check_folders()
        if self:
            check_installed((PACKAGE,), EXTRA, "engine.upscalers")

    def files(self) -> dict[str, pathlib.Path]:
        """Return the files by name, in the order of names; of equal names, the first folder's."""
        found: dict[str, pathlib.Path] = {}
        for _, folder in self._folders:
            if folder.is_dir():
                found = {file.stem: file for file in _list(folder, folder.stat().st_mtime_ns)} | found
        return dict(sorted(found.items()))

    def complete(self, name: str, field: str) -> PixelUpscaler:
        """Return the upscaler called `name`, with the digest of its file.

        Raises InvalidField: there is none, or it cannot be read.
        """
        if name in FILTERS:
            return PixelUpscaler(name)
        files = self.files()
        if name not in files:
            allowed = short_list(map(short_repr, (*FILTERS, *files)), _MAX_NAMES_IN_MESSAGES)
            raise InvalidField(
                f"{field} is {short_repr(name)}; upscalers of pixels are {allowed}. The operator sets folders of them: "
                "engine.upscalers.",
                field=field,
            )
        return PixelUpscaler(name, _digest_of(files[name]))

    def find(self, upscaler: PixelUpscaler, field: str) -> pathlib.Path:
        """Return the file of an upscaler, which is no filter. Raises InvalidField: it is gone, or has changed."""
        if self.complete(upscaler.name, field) != upscaler:
            raise InvalidField(
                f"{field}: the file of {short_repr(upscaler.name)} has changed. Send the request again.", field=field
            )
        return self.files()[upscaler.name]


@functools.lru_cache(maxsize=64)
def _list(folder: pathlib.Path, _changed_ns: int) -> tuple[pathlib.Path, ...]:
    """Return the files of a folder, which is read again when it has changed."""
    return tuple(
        file
        for file in sorted(folder.iterdir())
        if file.suffix in _SUFFIXES
        and file.stem.isprintable()
        and 0 < len(file.stem) <= _MAX_NAME_CHARS
        and file.stem not in FILTERS
        and file.is_file()
    )


def _digest_of(file: pathlib.Path) -> str:
    try:
        status = file.stat()
        file_size_bytes(file)  # raises if it is no regular file
        return _digest(file, status.st_ino, status.st_size, status.st_mtime_ns)
    except (OSError, ModelError) as error:
        raise InvalidField(f"the upscaler {short_repr(file.stem)} cannot be read.") from error


@functools.lru_cache(maxsize=256)
def _digest(file: pathlib.Path, _inode: int, size_bytes: int, _changed_ns: int) -> str:
    with file.open("rb") as opened:
        head = opened.read(_SAMPLED_BYTES)
        opened.seek(max(0, size_bytes - _SAMPLED_BYTES), os.SEEK_SET)
        return short_digest([size_bytes.to_bytes(8, "little"), head, opened.read(_SAMPLED_BYTES)])
