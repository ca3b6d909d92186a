"""Reads the SOURCE of a model for the registry, and copies what is not on this machine. Blocks."""

import contextlib
import pathlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from noria.config import EngineConfig
from noria.models.location import locate
from noria.models.opened_folder import opened_folder
from noria.registry.lineage.run_events import model_ref
from noria.registry.manifest import OnRead, report_nothing
from noria.registry.model_folder import PACKAGED, ModelFolder, check_model, read_model
from noria.registry.sources.copies import copy_model
from noria.registry.sources.filesystem import open_filesystem, open_hub
from noria.registry.sources.limits import SourceLimits
from noria.registry.sources.mlflow import MlflowClient
from noria.registry.sources.mlflow_run import events_of
from noria.registry.sources.remote_folder import RemoteFolder, model_in
from noria.registry.sources.source import (
    FileSource,
    FilesystemSource,
    HubSource,
    LocalSource,
    MlflowSource,
    Source,
    parse_source,
)


def read_source(
    text: str,
    model: str,
    data_folder: pathlib.Path,
    environment: Mapping[str, str],
    report: Callable[[str], None],
    limits: SourceLimits | None = None,
    on_read: OnRead = report_nothing,
    vae: str = "",
    parts: Sequence[str] = (),
) -> ModelFolder:
    """Return the folder that a source of `model` names, or a copy of it in `data_folder`; `report` says what is copied.

    A single file is converted to a folder there, with the VAE in the file `vae` and what it lacks from a folder of
    `parts`. `limits` are those of what is read for others than the operator.

    Raises:
        MissingExtra: a package that serving the model needs is not installed.
        ModelError: there is no such source, it cannot or may not be read, or it is no model that is supported.
        RegistryError: the source holds a secret.
    """

    def copied(remote: RemoteFolder) -> ModelFolder:
        found = model_in(remote)
        if limits is not None:
            limits.check_size(found.url, found.size_bytes)
        folder = read_model(str(copy_model(found, data_folder / "models", report, check_model)), on_read)
        return replace(folder, source=text, revision=remote.revision)

    def allowed(source: Source) -> Source:
        return source if limits is None else limits.check(source)

    source = allowed(parse_source(text, environment))
    match source:
        case LocalSource(name) if limits is not None and name not in PACKAGED:
            return _read_below(pathlib.Path(name), limits)
        case LocalSource():
            return read_model(source.name, on_read)
        case FileSource(name):
            engine = EngineConfig(cache_dir=str(data_folder), vae=vae, parts=tuple(parts))
            return replace(read_model(str(locate(name, engine)[0]), on_read), source=text)
        case HubSource():
            return copied(open_hub(source))
        case FilesystemSource():
            return copied(open_filesystem(source.url))
        case MlflowSource():
            with contextlib.closing(MlflowClient(source.server, environment)) as client:
                remote, run = client.open(source, allowed)
                if run is not None:  # raises before anything is copied
                    events_of(run, source.server, model_ref(model, ""), remote.url)
                folder = copied(remote)
            if run is None:
                return folder
            made = events_of(run, source.server, model_ref(model, folder.manifest.digest), folder.url)
            return replace(folder, events=[*folder.events, *made])


def _read_below(folder: pathlib.Path, limits: SourceLimits) -> ModelFolder:
    """Return a folder of which nothing is read that is not below the roots of the limits. Raises ModelError."""
    if not folder.is_dir():
        return read_model(str(folder))  # which says so
    with opened_folder(folder, limits.roots) as opened:
        read = read_model(str(opened))
    return replace(read, source=str(folder), url=folder.as_uri())
