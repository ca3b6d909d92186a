"""The routes that a server followed last, in a file of its data folder: it starts with them without its registry."""

import os
import pathlib

import msgspec

from noria.config import Config
from noria.errors import ConfigError
from noria.folders import data_folder
from noria.protocol.routes import Routes
from noria.storage.private_files import replace_private_file


def routes_file(config: Config) -> pathlib.Path:
    """Return the path of the file."""
    return data_folder(config, os.environ) / "routes.json"


def read_routes(file: pathlib.Path) -> Routes:
    """Return the routes in a file; none if it does not exist. Raises ConfigError: it cannot be read, or is damaged."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=Routes)
    except FileNotFoundError:
        return Routes()
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{file}: the routes of deployments cannot be read: {error}. Delete the file: the registry has them, too."
        ) from error


def write_routes(file: pathlib.Path, routes: Routes) -> None:
    """Replace the routes in a file; who reads it meanwhile gets the old or the new ones. Raises OSError."""
    replace_private_file(file, msgspec.json.encode(routes))
