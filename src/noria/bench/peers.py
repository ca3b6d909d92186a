"""The virtual environments of the peers: `noria bench install PEER` makes one, and a bench runs the peer's server in it."""

import os
import pathlib

from noria.errors import ConfigError


def folder_of(peer: str) -> pathlib.Path:
    """Where its environment is: `noria/peers/PEER` in XDG_CACHE_HOME or ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(cache) / "noria" / "peers" / peer


def python_of(peer: str) -> pathlib.Path:
    """The Python that its server runs on.

    Raises:
        ConfigError: it is not installed.

    """
    python = folder_of(peer) / "bin" / "python"
    if not python.is_file():
        raise ConfigError(f"{peer} is not installed; install it with: noria bench install {peer}")
    return python
