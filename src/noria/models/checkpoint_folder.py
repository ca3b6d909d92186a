"""The folder of image models that are loaded when requests name them (`engine.checkpoints`): what is in it."""

import os
import pathlib
import stat
from collections.abc import Iterable, Sequence

from noria.config import EngineConfig
from noria.errors import ConfigError, ModelError, NoriaError, short_repr
from noria.models.families import identify_family
from noria.models.location import SINGLE_FILES, check_single_file, name_of

_INDEX = "model_index.json"


def checkpoint_files(folder: str, entries: Iterable[str]) -> dict[str, pathlib.Path]:
    """Return the files and folders `entries` of `folder` by the names of their models."""
    paths = [pathlib.Path(folder).expanduser() / entry for entry in entries]
    return {name_of(path.name if path.is_dir() else path.stem): path for path in paths}


def list_checkpoints(engine: EngineConfig, served: Sequence[str] = ()) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the files and folders that can be loaded, and sentences about those that cannot.

    Of files only the headers are read. What is in `served`, the sources of other models, is left out.

    Raises ConfigError: there is no such folder, no model is in it, or two have one name.
    """
    folder, setting = pathlib.Path(engine.checkpoints).expanduser(), f"engine.checkpoints is {engine.checkpoints!r}"
    try:
        paths = sorted(path for path in folder.iterdir() if not path.name.startswith("."))  # macOS writes ._NAME
    except OSError as error:
        raise ConfigError(f"{setting}, which cannot be read: {error.strerror}. Give a folder of models.") from error
    others = {pathlib.Path(source).expanduser().absolute() for source in served}
    found: dict[str, pathlib.Path] = {}
    refused = []
    for path in paths:
        if path.absolute() in others:
            continue
        try:
            if not _is_model(path):
                continue
            _check(path, engine)
        except NoriaError as error:
            refused.append(error.message)
            continue
        except OSError as error:
            refused.append(f"{path} cannot be read: {error.strerror}.")
            continue
        (name,) = checkpoint_files(engine.checkpoints, [path.name])
        if name in found:
            raise ConfigError(f"{setting}: {found[name].name} and {path.name} are both called {name!r}. Rename one.")
        found[name] = path
    if not found:
        reasons = f": {' '.join(refused)}" if refused else ", neither .safetensors nor a folder in diffusers format."
        raise ConfigError(f"{setting}, where nothing can be loaded on demand{reasons}")
    return tuple(path.name for path in found.values()), tuple(refused)


def _is_model(path: pathlib.Path) -> bool:
    """Whether a file or folder may be a model. Raises OSError, and ModelError for a folder of single files."""
    if not stat.S_ISDIR(path.stat().st_mode):
        return path.suffix.lower() in SINGLE_FILES
    names = os.listdir(path)
    if _INDEX not in names and any(pathlib.Path(name).suffix.lower() in SINGLE_FILES for name in names):
        raise ModelError(f"{path} has no {_INDEX}, and single files in a subfolder are not served. Move them up.")
    return _INDEX in names


def _check(path: pathlib.Path, engine: EngineConfig) -> None:
    """Raise NoriaError if a file or folder is no image model that is served."""
    if path.is_file():
        check_single_file(path, engine)
    elif identify_family(path).index_file != _INDEX:
        raise ModelError(f"{short_repr(str(path))} is no image model.")
