"""The folders of embeddings (textual inversion) that prompts in A1111's syntax can name: their files. No torch.

An embedding's name is that of its file, without the suffix. Folders are listed again when they have changed; what a
file contains is checked when an engine loads it.
"""

import functools
import pathlib
from collections.abc import Iterable

from noria.errors import InvalidField, short_repr
from noria.models.adapters.folder_entries import FolderEntries
from noria.models.adapters.lora_folders import digest_of
from noria.models.diffusion.prompts.a1111_syntax import parse
from noria.models.diffusion.prompts.embedding_names import EmbeddingNames
from noria.protocol.diffusion import Embedding

_SUFFIX = ".safetensors"
_PICKLES = (".pt", ".bin", ".pth", ".ckpt")
_MAX_NAME_CHARS = 128
_MAX_USED = 32  # embeddings of a request


class EmbeddingFolders(FolderEntries):
    """The setting `engine.embeddings`."""

    setting = "embeddings"

    def files(self, model: str) -> dict[str, pathlib.Path]:
        """Return the files for a model by name, in the order of names; of equal names, the first folder's."""
        return {name: file for name, file in self._names(model).files.items() if file.suffix == _SUFFIX}

    def used_in(self, texts: Iterable[str], model: str) -> tuple[Embedding, ...]:
        """Return the embeddings that prompts in A1111's syntax name, with the digests of their files.

        Raises InvalidField: there are too many, or a file is a pickle or cannot be read.
        """
        listed = self._names(model)
        names = sorted({name for text in texts for part in _parts(text) for _, _, name in listed.names.find(part)})
        if len(names) > _MAX_USED:
            raise InvalidField(
                f"prompt: names {len(names)} embeddings; at most {_MAX_USED} are allowed.", field="prompt"
            )
        return tuple(Embedding(name, _digest(listed.files[name])) for name in names)

    def find(self, embedding: Embedding, model: str) -> pathlib.Path:
        """Return the file of an embedding. Raises InvalidField: it is gone, or has another digest now."""
        file = self._names(model).files.get(embedding.name)
        if file is None or _digest(file) != embedding.digest:
            raise InvalidField(
                f"prompt: the file of the embedding {short_repr(embedding.name)} has changed. Send the request again.",
                field="prompt",
            )
        return file

    def _names(self, model: str) -> "_Listed":
        return _list(tuple((folder, folder.stat().st_mtime_ns) for folder in self._folders_of(model)))


class _Listed:
    """The files of some folders, and their names."""

    def __init__(self, files: dict[str, pathlib.Path]) -> None:
        self.files, self.names = files, EmbeddingNames(files)


@functools.lru_cache(maxsize=256)
def _list(folders: tuple[tuple[pathlib.Path, int], ...]) -> _Listed:
    """Return the files of folders, each of which is read again when it has changed."""
    found: dict[str, pathlib.Path] = {}
    for folder, _ in folders:
        files = sorted(folder.iterdir(), key=lambda file: (file.suffix != _SUFFIX, file.name))
        for file in files:
            is_name = file.stem.isprintable() and len(file.stem) <= _MAX_NAME_CHARS
            if is_name and file.suffix in (_SUFFIX, *_PICKLES) and file.is_file():
                found.setdefault(file.stem, file)
    return _Listed(dict(sorted(found.items())))


def _parts(prompt: str) -> list[str]:
    """Return the texts in which a text encoder finds names; none of a prompt that is rejected for its syntax."""
    try:
        return [part.text for section in parse(prompt) for part in section]
    except InvalidField:
        return []


def _digest(file: pathlib.Path) -> str:
    if file.suffix != _SUFFIX:
        raise InvalidField(
            f"prompt: the embedding {short_repr(file.stem)} is a {file.suffix} file, a pickle, which can run any code "
            f"when it is read. Convert it to {_SUFFIX}, or give its words another form.",
            field="prompt",
        )
    try:
        return digest_of(file)
    except InvalidField as error:
        raise InvalidField(f"prompt: the embedding {short_repr(file.stem)} cannot be read.", field="prompt") from error
