"""The sources that the SOURCE of a model names. Pure.

    FOLDER, file:///FOLDER, bundled, minilm     used where it is
    FILE.safetensors, hf://OWNER/NAME/FILE.safetensors[@REVISION]    a checkpoint, which is converted
    hf://OWNER/NAME[@REVISION]                  the hub that HF_ENDPOINT names
    mlflow:models:/NAME@ALIAS, …/NAME/NUMBER    the server that MLFLOW_TRACKING_URI names
    s3://BUCKET/FOLDER and the like             a folder of a filesystem of fsspec

Sources are kept and shown, so none may hold a secret.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from noria.errors import ModelError, RegistryError, short_repr
from noria.models.location import HUB_FILE, is_single_file
from noria.observe.logs.redaction import redact

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:")
_HUB = re.compile(r"hf://(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]{1,200}))?", re.ASCII)
_MLFLOW = re.compile(r"mlflow:models:/(?P<model>[^@/:\\]{1,256})(?:/(?P<number>\d{1,9})|@(?P<alias>[^@/:\\]{1,256}))")
_NOT_FOLDERS = ("http", "https", "data", "generic", "reference")


@dataclass(frozen=True)
class LocalSource:
    """A folder, or a model in a package."""

    name: str


@dataclass(frozen=True)
class FileSource:
    """A checkpoint in a single file, of this machine or of the hub, as `models/location.py` takes it."""

    name: str


@dataclass(frozen=True)
class HubSource:
    """A repository of the hub."""

    repo: str
    revision: str | None


@dataclass(frozen=True)
class MlflowSource:
    """A version of a model that an MLflow server has registered."""

    server: str  # its URL, without a slash at the end
    model: str
    number: str | None  # either this or the alias
    alias: str | None


@dataclass(frozen=True)
class FilesystemSource:
    """A folder of one of fsspec's filesystems."""

    url: str


Source = LocalSource | FileSource | HubSource | MlflowSource | FilesystemSource


def parse_source(text: str, environment: Mapping[str, str]) -> Source:
    """Return what a text names.

    Raises:
        ModelError: it is no source.
        RegistryError: it holds a secret; the message does not quote it.
    """
    if not _SCHEME.match(text):
        return FileSource(text) if is_single_file(text) else LocalSource(text)
    _reject_secrets(text, "the source")
    scheme = text.partition(":")[0]
    match scheme:
        case "hf":
            return FileSource(text) if HUB_FILE.fullmatch(text) else _parse_hub(text)
        case "mlflow":
            return _parse_mlflow(text, environment)
        case "file" | "local":
            path = _local_folder(text)
            return FileSource(path) if is_single_file(path) else LocalSource(path)
    if "://" not in text or "::" in text or scheme in _NOT_FOLDERS:
        raise ModelError(
            f"{short_repr(text)} is no source of models. Give a model folder, bundled, minilm, "
            "hf://OWNER/NAME@REVISION, mlflow:models:/NAME@ALIAS, or the URL of a folder in a store that fsspec reads, "
            "such as s3://BUCKET/FOLDER. Download a folder from a web server, and unpack an archive, yourself."
        )
    return FilesystemSource(text)


def _parse_hub(text: str) -> HubSource:
    found = _HUB.fullmatch(text)
    if found is None or ".." in text:
        raise ModelError(
            f"{short_repr(text)} is no model of the hub; allowed is hf://OWNER/NAME or hf://OWNER/NAME@REVISION. "
            "HF_ENDPOINT names another hub."
        )
    return HubSource(found["repo"], found["revision"])


def _parse_mlflow(text: str, environment: Mapping[str, str]) -> MlflowSource:
    found = _MLFLOW.fullmatch(text)
    if found is None:
        raise ModelError(
            f"{short_repr(text)} is no model of MLflow; allowed is mlflow:models:/NAME@ALIAS or "
            "mlflow:models:/NAME/NUMBER. MLFLOW_TRACKING_URI names the server."
        )
    server = environment.get("MLFLOW_TRACKING_URI", "")
    _reject_secrets(server, "MLFLOW_TRACKING_URI")
    if not server.startswith(("http://", "https://")):
        got = f"MLFLOW_TRACKING_URI is {short_repr(server)}" if server else "MLFLOW_TRACKING_URI is not set"
        raise ModelError(f"{text}: {got}; allowed is the URL of an MLflow server, such as http://127.0.0.1:5000.")
    return MlflowSource(server.rstrip("/"), found["model"], found["number"], found["alias"])


def _local_folder(text: str) -> str:
    parts = urlsplit(text)
    if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
        raise ModelError(f"{short_repr(text)} is no folder of this machine; allowed is file:///FOLDER.")
    return unquote(parts.path)


def _reject_secrets(url: str, what: str) -> None:
    """Raise RegistryError if a URL holds a secret; the message does not quote it."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise RegistryError(f"{what} is not a URL.") from error
    if parts.password is not None or parts.query or redact(url) != url:
        raise RegistryError(
            f"{what} has a password or a query, and the registry would show it. Remove it, and set it where it is read "
            "from the environment: HF_TOKEN, MLFLOW_TRACKING_TOKEN, MLFLOW_TRACKING_USERNAME and _PASSWORD, AWS_…, or "
            "fsspec's configuration (~/.config/fsspec)."
        )
