"""The counts of a server, in a file of its data folder: the registrar writes it, front ends and commands read it."""

import os
import pathlib

import msgspec

from noria.config import Config
from noria.errors import ConfigError
from noria.folders import data_folder
from noria.statistics.windows import Snapshot


def statistics_file(config: Config) -> pathlib.Path:
    """Return the path of the file."""
    return data_folder(config, os.environ) / "statistics.json"


def read_statistics(file: pathlib.Path) -> Snapshot | None:
    """Return what the file has; None: nothing was ever counted.

    Raises ConfigError: it cannot be read, or is damaged.
    """
    try:
        return msgspec.json.decode(file.read_bytes(), type=Snapshot)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, ValueError) as error:
        raise ConfigError(
            f"{file}: the statistics cannot be read: {error}. Delete the file: counting begins anew, references are in "
            "the registry."
        ) from error


def encode_statistics(snapshot: Snapshot) -> bytes:
    """Return the content of the file."""
    return msgspec.json.encode(snapshot)
