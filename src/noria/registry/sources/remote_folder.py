"""The base of every source of files: a listing, and a way to read one file of it."""

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from noria.errors import ModelError, NoriaError, short_repr
from noria.extras import check_installed
from noria.models.families import INDEX_FILES, family_of
from noria.models.files.weights import parse_object
from noria.models.needed_files import find_model_root, select_needed_files
from noria.observe.logs.redaction import redact
from noria.registry.manifest import LINEAGE_FILE

_MAX_ENTRIES = 10_000
CHUNK_BYTES = 1_048_576
_MAX_TEXT_BYTES = 2**26  # size of files other than weights; `models/files/weights.py` reads no larger ones
_MLFLOW_MODEL, _MLFLOW_TOKENIZER = "/model/", "components/tokenizer/"
_BAD_PATH = re.compile(r"(^|/)\.{0,2}(/|$)|[\x00-\x1f\x7f\\]")  # "", "." and ".." as a name; control characters


@dataclass(frozen=True)
class RemoteFile:
    """A file in a listing."""

    path: str
    size_bytes: int
    sha256: str | None = None  # in hexadecimal digits, if the source states it
    state: str = ""  # what else the source states, such as an ETag: another content has another


@dataclass(frozen=True)
class RemoteFolder:
    """The files of a source."""

    url: str  # without secrets
    revision: str | None  # what the source calls this state of the content: a commit, a number
    files: tuple[RemoteFile, ...]
    read: Callable[[str], Iterator[bytes]]  # the content of a path, in chunks; raises what the source raises

    @property
    def digest(self) -> str:
        """The hexadecimal SHA-256 of the listing: a source whose files have changed has another."""
        url = self.url.removesuffix(f"@{self.revision}")  # a commit that changes other files is no other content
        listed = [url, *((file.path, file.size_bytes, file.sha256, file.state) for file in self.files)]
        return hashlib.sha256(repr(listed).encode()).hexdigest()

    @property
    def size_bytes(self) -> int:
        """The size of all files."""
        return sum(file.size_bytes for file in self.files)


def check_num_entries(number: int, url: str) -> None:
    """Raise ModelError if a listing has too many files and folders."""
    if number > _MAX_ENTRIES:
        raise ModelError(f"{url} has more than {_MAX_ENTRIES} files and folders. Name the model's folder.")


def model_in(folder: RemoteFolder) -> RemoteFolder:
    """Return the model in a folder: only the files that serving it needs, by their paths in the model's own folder.

    Reads the file that says what it is, so that nothing is copied of a model that cannot be served.

    Raises:
        MissingExtra: a package that serving it needs is not installed.
        ModelError: there is no model, or one of no family, or only pickles of it; a path or a size is not allowed.
    """
    for file in folder.files:
        if _BAD_PATH.search(file.path) or len(file.path) > 1000:
            raise ModelError(
                f"{folder.url} has a file named {short_repr(file.path)}; allowed are paths of at most 1000 characters "
                "without .., backslashes and control characters."
            )
    root = find_model_root([file.path for file in folder.files], folder.url)
    inside = _files_of_model(folder.files, root)
    index = next(name for name in INDEX_FILES if name in inside)
    source = f"{folder.url}/{root}{index}"
    family = family_of(index, parse_object(_read_text(folder, root + index), source), source)
    check_installed(family.packages, family.extra, f"the model in {folder.url}")
    needed = select_needed_files(inside, family, folder.url)
    if LINEAGE_FILE in inside:
        needed.append(LINEAGE_FILE)
    for path in needed:
        if not path.endswith((".safetensors", ".gguf")):
            _check_text_size(inside[path].size_bytes, path, folder.url)
    files = tuple(replace(inside[path], path=path) for path in needed)
    return replace(folder, files=files, read=lambda path: folder.read(inside[path].path))


def read_chunks(folder: RemoteFolder, path: str) -> Iterator[bytes]:
    """Yield a file's content. Raises ModelError: it cannot be read."""
    try:
        yield from folder.read(path)
    except NoriaError:
        raise
    except Exception as error:  # each source raises errors of its own
        raise ModelError(
            f"{folder.url}: {path} cannot be read: {one_line(error)}. What is complete is kept; run the same command "
            "again."
        ) from error


def one_line(error: Exception) -> str:
    """Return the first line of what an error says, without secrets."""
    return redact(str(error).strip().partition("\n")[0].rstrip(".")) or type(error).__name__


def _read_text(folder: RemoteFolder, path: str) -> bytes:
    content = b""
    for chunk in read_chunks(folder, path):
        content += chunk
        _check_text_size(len(content), path, folder.url)
    return content


def _check_text_size(size_bytes: int, path: str, url: str) -> None:
    if size_bytes > _MAX_TEXT_BYTES:
        raise ModelError(f"{url}: {path} has {size_bytes} bytes; at most {_MAX_TEXT_BYTES} are allowed.")


def _files_of_model(files: Sequence[RemoteFile], root: str) -> dict[str, RemoteFile]:
    """Return the files by their paths in the model's own folder.

    Those of MLflow's flavour "transformers" are in two, `model/` and `components/tokenizer/`.
    """
    found = {file.path[len(root) :]: file for file in files if file.path.startswith(root)}
    if f"/{root}".endswith(_MLFLOW_MODEL):
        tokenizer = root.removesuffix(_MLFLOW_MODEL.removeprefix("/")) + _MLFLOW_TOKENIZER
        beside = {file.path[len(tokenizer) :]: file for file in files if file.path.startswith(tokenizer)}
        found = beside | found
    return found
