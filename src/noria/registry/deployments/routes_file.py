"""The routes that a server followed last, in a file of its data folder: it starts with them without its registry."""

import os
import pathlib

import msgspec

from noria.config import Config, data_folder
from noria.errors import ConfigError
from noria.protocol.routes import Routes
from noria.storage.private_files import make_private_folder


def routes_file(config: Config) -> pathlib.Path:
    """Return the path of the file."""
    return data_folder(config, os.environ) / "routes.json"


def read_routes(file: pathlib.Path) -> Routes:
    """Return the routes in a file; none if it does not exist.

    Raises:
        ConfigError: it cannot be read, or is damaged.

    """
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
    make_private_folder(file.parent)
    new = file.with_name(f"{file.name}.{os.getpid()}")
    descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as opened:
        opened.write(msgspec.json.encode(routes))
        opened.flush()
        os.fsync(opened.fileno())
    os.replace(new, file)
