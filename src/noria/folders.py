"""Where data and caches are: the folders of the settings, or those of the user (XDG Base Directory Specification).

And whether a file has changed.
"""

import os
import pathlib
from collections.abc import Mapping

from noria.config import Config
from noria.errors import ConfigError


def data_folder(config: Config, environment: Mapping[str, str]) -> pathlib.Path:
    """The folder that `config.data_dir` names; it is not created.

    A relative $XDG_DATA_HOME is ignored, as the XDG Base Directory Specification demands.

    Raises ConfigError: `auto`, and there is neither $XDG_DATA_HOME nor a home folder.
    """
    if config.data_dir != "auto":
        return pathlib.Path(config.data_dir).absolute()
    home = pathlib.Path(environment.get("XDG_DATA_HOME", ""))
    if home.is_absolute():
        return home / "noria"
    try:
        return pathlib.Path.home() / ".local" / "share" / "noria"
    except RuntimeError as error:
        raise ConfigError(
            "setting data_dir is 'auto', and there is neither $XDG_DATA_HOME nor a home folder. Set --data-dir FOLDER."
        ) from error


def shipped_folder(in_package: str, in_repository: str, file: str) -> pathlib.Path | None:
    """The folder of files that a wheel has in the package, and a clone in the repository; None: there is none.

    It has `file`; another folder of this name is not it.
    """
    package = pathlib.Path(__file__).parent
    candidates = (package / in_package, package.parent.parent / in_repository)
    return next((folder for folder in candidates if (folder / file).is_file()), None)


def documents() -> dict[str, pathlib.Path]:
    """The files of the documents by their names: "settings.md", then "benchmarks/cost.md"; none without documents."""
    folder = shipped_folder("documents", "docs", "settings.md")
    if folder is None:
        return {}
    files = [*sorted(folder.glob("*.md")), *sorted(folder.glob("*/*.md"))]
    return {file.relative_to(folder).as_posix(): file for file in files}


def cache_folder(cache_dir: str, environment: Mapping[str, str]) -> pathlib.Path:
    """`cache_dir`, or a folder in the user's cache folder if that is empty; it is not created."""
    if cache_dir:
        return pathlib.Path(cache_dir)
    return pathlib.Path(environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "noria"


def file_version(path: str | os.PathLike[str]) -> tuple[int, ...]:
    """Return what differs when the file or its mode has changed; nothing if there is none."""
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size
