"""Reads a model folder for the registry: what it is, the digest of its content, and the lineage that it brings."""

import pathlib
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from noria.errors import ModelError, RequestError
from noria.models.catalog import open_model
from noria.models.location import locate
from noria.registry.lineage.openlineage import Event, parse_event
from noria.registry.manifest import LINEAGE_FILE, Manifest, OnRead, read_manifest, report_nothing

PACKAGED = ("bundled", "minilm")  # models in Python packages: their folders move with the environment
_PACKAGED_SCHEME = "noria"
_MAX_LINEAGE_BYTES = 16_777_216


@dataclass(frozen=True)
class ModelFolder:
    """A model folder that was read and checked."""

    source: str  # as it was named
    url: str  # URL of the folder
    kind: str
    fingerprint: str
    manifest: Manifest
    events: list[Event]  # events of its lineage file, and of the run that its source knows
    revision: str | None = None  # set if its source has revisions


def read_model(source: str, on_read: OnRead = report_nothing) -> ModelFolder:
    """Read and check a folder, or one of the models in packages, `bundled` and `minilm`.

    Raises:
        MissingExtra: a package that serving it needs is not installed.
        ModelError: there is no such folder, or it is damaged or not supported.
    """
    if source not in PACKAGED and not pathlib.Path(source).expanduser().is_dir():
        raise ModelError(
            f"no such folder: {source}. Give a model folder, bundled, minilm, a file .safetensors or .gguf, "
            "hf://OWNER/NAME, mlflow:models:/NAME@ALIAS, or the URL of a folder, such as s3://BUCKET/FOLDER."
        )
    spec = open_model(source)
    folder = pathlib.Path(spec.folder)
    url = f"{_PACKAGED_SCHEME}:{source}" if source in PACKAGED else folder.as_uri()
    return ModelFolder(source, url, spec.kind, spec.fingerprint, read_manifest(folder, on_read), _read_lineage(folder))


def check_model(folder: pathlib.Path) -> None:
    """Raise ModelError if `read_model` would, and MissingExtra likewise; read no more of the weights than it takes."""
    open_model(str(folder))
    _read_lineage(folder)


def folder_of(url: str) -> pathlib.Path | None:
    """Return the folder that a location's URL names on this machine; None: it names none.

    Raises MissingExtra: the package that it is in is not installed.
    """
    parts = urlsplit(url)
    if parts.scheme == _PACKAGED_SCHEME:
        return locate(parts.path)[0]
    return pathlib.Path(unquote(parts.path)) if parts.scheme == "file" else None


def _read_lineage(folder: pathlib.Path) -> list[Event]:
    file = folder / LINEAGE_FILE
    if not file.exists():
        return []
    if not file.is_file() or file.stat().st_size > _MAX_LINEAGE_BYTES:
        raise ModelError(f"{file}: is no regular file of at most {_MAX_LINEAGE_BYTES} bytes.")
    try:
        lines = file.read_bytes().split(b"\n")
        return [parse_event(line, f"line {number}: ") for number, line in enumerate(lines, 1) if line.strip()]
    except OSError as error:
        raise ModelError(f"{file}: cannot be read: {error.strerror}.") from error
    except RequestError as error:
        raise ModelError(f"{file}: {error.message}") from error
