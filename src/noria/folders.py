"""Where data and caches are: the folders of the settings, or those of the user (XDG Base Directory Specification)."""

import os.path
import pathlib
from collections.abc import Mapping

from noria.config import Config
from noria.errors import ConfigError


def data_folder(config: Config, environment: Mapping[str, str]) -> pathlib.Path:
    """The folder that `config.data_dir` names; it is not created.

    A relative $XDG_DATA_HOME is ignored, as the XDG Base Directory Specification demands.

    Raises:
        ConfigError: `auto`, and there is neither $XDG_DATA_HOME nor a home folder.

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


def cache_folder(cache_dir: str, environment: Mapping[str, str]) -> pathlib.Path:
    """`cache_dir`, or a folder in the user's cache folder if that is empty; it is not created."""
    if cache_dir:
        return pathlib.Path(cache_dir)
    return pathlib.Path(environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "noria"
