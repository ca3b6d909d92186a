"""The folders of LoRA files that the operator allows for image models: their names and digests. No torch.

An adapter's name is that of its file, without `.safetensors`. Folders are listed when a request asks for an adapter, so
that files can be added and replaced while the server runs; what a file contains is checked when an engine loads it.
"""

import functools
import os
import pathlib
import unicodedata
from collections.abc import Sequence

import msgspec

from noria.config import EngineConfig
from noria.errors import InvalidField, LoraNotFound, ModelError, short_list, short_repr
from noria.models.adapters.folder_entries import FolderEntries, split_entry
from noria.models.files.weights import file_size_bytes, identifying_bytes, short_digest
from noria.models.location import BUNDLED
from noria.protocol.diffusion import DiffusionModelSpec, Lora
from noria.protocol.kinds import AnyModelSpec

_SUFFIX = ".safetensors"
BUNDLED_ENTRY = "bundled"  # the LoRAs that come with the bundled model, for this model alone, which need not be served
_BUNDLED = "noria-shapes", BUNDLED.with_name("bundled_loras")
_MAX_NAME_CHARS = 128
_MAX_NAMES_IN_MESSAGES = 50
NO_LORAS = "it has none; the operator sets folders of them: engine.loras"
"""The words of messages about a model without adapters."""


class LoraFolders(FolderEntries):
    """The setting `engine.loras`, of which an entry can also be `bundled`."""

    setting = "loras"
    forms = "FOLDER, MODEL=FOLDER, bundled or hf://ORG/NAME[/FILE.safetensors][@REVISION]"

    def __init__(self, entries: Sequence[str]) -> None:
        self._folders = [_BUNDLED if entry == BUNDLED_ENTRY else split_entry(entry) for entry in entries]

    @classmethod
    def of(cls, config: EngineConfig) -> "LoraFolders":
        """Return the folders of an engine: without those of the bundled model if models are compiled."""
        return cls([entry for entry in config.loras if not (config.compile and entry == BUNDLED_ENTRY)])

    def _served(
        self, only_for: str | None, entry: pathlib.Path, models: Sequence[AnyModelSpec]
    ) -> list[DiffusionModelSpec]:
        return [] if (only_for, entry) == _BUNDLED else super()._served(only_for, entry, models)

    def are_for(self, model: str) -> bool:
        """Return whether a folder is for this model; it may be empty."""
        return bool(self._folders_of(model))

    def files(self, model: str) -> dict[str, pathlib.Path]:
        """Return the files for a model by name, in the order of names; of equal names, the first folder's."""
        found: dict[str, pathlib.Path] = {}
        for folder in self._folders_of(model):
            found = {file.stem: file for file in _loras_in(folder, folder.stat().st_mtime_ns)} | found
        return dict(sorted(found.items()))

    def find(self, lora: Lora, model: str) -> pathlib.Path:
        """Return the file of an adapter, which is of the digest that `lora` has, if it has one.

        Raises:
            LoraNotFound: there is none of this name; with the names that exist.
            InvalidField: it cannot be read, or its digest is another.
        """
        file = self._file(lora.name, model)
        if file is None:
            names = [short_repr(name) for name in self.files(model)]
            allowed = f"allowed are {short_list(names, _MAX_NAMES_IN_MESSAGES)}" if names else NO_LORAS
            raise LoraNotFound(f"loras: {model} has no LoRA {short_repr(lora.name)}; {allowed}.", field="loras")
        check_digest(lora, file)
        return file

    def complete(self, loras: Sequence[Lora], model: str) -> tuple[Lora, ...]:
        """Return `loras` with their digests. Raises LoraNotFound and InvalidField as `find`."""
        return tuple(msgspec.structs.replace(lora, digest=digest_of(self.find(lora, model))) for lora in loras)

    def _file(self, name: str, model: str) -> pathlib.Path | None:
        """Return the file of `files(model)` that has this name, in any form of Unicode.

        A request that names what exists costs a stat: folders are not listed.
        """
        if not _is_name(name):
            return None
        files = (folder / f"{name}{_SUFFIX}" for only_for, folder in self._folders if only_for in (None, model))
        found = next((file for file in files if os.path.isfile(file)), None)  # False for names too long for a disk
        if found is None and not name.isascii():  # a disk may have it in another form of Unicode than a keyboard
            composed = {unicodedata.normalize("NFC", each): file for each, file in self.files(model).items()}
            found = composed.get(unicodedata.normalize("NFC", name))
        return found


@functools.lru_cache(maxsize=256)
def _loras_in(folder: pathlib.Path, _changed_ns: int) -> tuple[pathlib.Path, ...]:
    """Return the files of a folder, which is read again when it has changed."""
    files = (file for file in folder.iterdir() if file.suffix == _SUFFIX and _is_name(file.stem))
    return tuple(file for file in files if file.is_file())


def _is_name(name: str) -> bool:
    """Whether `name` names a file, and no folder."""
    return 0 < len(name) <= _MAX_NAME_CHARS and name.isprintable() and "/" not in name


def check_digest(lora: Lora, file: pathlib.Path) -> None:
    """Raise InvalidField if the file of an adapter cannot be read, or is of another digest than `lora` has."""
    digest = digest_of(file)
    if lora.digest not in (None, digest):
        raise InvalidField(
            f"loras: {short_repr(lora.name)} has digest {digest} now, and not {short_repr(lora.digest)}. Leave the "
            "digest out to use the file as it is.",
            field="loras",
        )


def digest_of(file: pathlib.Path) -> str:
    """Return the first 12 hexadecimal digits of a SHA-256, as of a model's fingerprint: size, header, start and end.

    Raises InvalidField: the file cannot be read, or its header is too long.
    """
    try:
        status = file.stat()
        file_size_bytes(file)  # raises if it is no regular file
        return _digest(file, status.st_ino, status.st_size, status.st_mtime_ns)
    except (OSError, ModelError) as error:
        raise InvalidField(f"loras: {short_repr(file.stem)} cannot be read.", field="loras") from error


@functools.lru_cache(maxsize=4096)
def _digest(file: pathlib.Path, *_version: int) -> str:
    return short_digest(identifying_bytes(file))
