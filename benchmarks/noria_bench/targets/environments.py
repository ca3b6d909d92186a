"""The virtual environments of the peers: `noria bench install PEER` makes one, and a bench runs the peer's server in it.

Each is layered (ADR 11): first what pip installed for the peer, behind it all of the environment that Noria runs in. So torch,
diffusers, transformers and Noria itself are the very same files for every target, and nothing that a peer wants can change Noria's.

A file, written last, says that an environment is whole and what it was made for. Without it there is none.
"""

import importlib.metadata
import os
import pathlib
import shutil
import site
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence

import msgspec

from noria.errors import ConfigError

# The newest of November 2026. All of them have wheels for Python 3.11 to 3.13.
REQUIREMENTS = {"litserve": "litserve==0.2.19", "bentoml": "bentoml==1.4.39", "ray": "ray[serve]==2.60.0"}

# What draws. pip may not install any of it a second time: every target draws with the same.
_SHARED_PACKAGES = (
    "torch",
    "diffusers",
    "transformers",
    "tokenizers",
    "safetensors",
    "huggingface-hub",
    "numpy",
    "pillow",
    "msgspec",
)
_MARKER = "noria-peer.json"
_LAST_LINES = 8


class _EnvironmentMarker(msgspec.Struct, frozen=True):
    """What an environment was made for; another wish makes another environment."""

    requirement: str
    python: str
    fallback_paths: tuple[str, ...]


def folder_of(peer: str) -> pathlib.Path:
    """Where its environment is: `noria/peers/PEER` in XDG_CACHE_HOME or ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(cache) / "noria" / "peers" / peer


def python_of(peer: str) -> pathlib.Path:
    """The Python that its server runs on.

    Raises:
        ConfigError: it is not installed, half made, or made for another version, Python or environment of Noria's.

    """
    if not _is_installed(peer):
        raise ConfigError(f"{peer} is not installed for this Noria; install it with: noria bench install {peer}")
    return _python_in(folder_of(peer))


def install(peer: str, log_status: Callable[[str], None]) -> None:
    """Make the environment of `peer` unless it is there; `say` is told, a line at a time, what takes long.

    Raises:
        ConfigError: no such peer, or no environment can be made; with pip's last words.

    """
    if peer not in REQUIREMENTS:
        raise ConfigError(f"no peer is called {peer!r}; peers are {', '.join(REQUIREMENTS)}")
    folder, expected = folder_of(peer), _expected_marker(peer)
    if _is_installed(peer):
        log_status(f"{expected.requirement} is installed in {folder}")
        return
    shutil.rmtree(folder, ignore_errors=True)
    log_status(f"making a virtual environment in {folder}")
    _run([sys.executable, "-m", "venv", str(folder)], f"no virtual environment could be made in {folder}")
    # Python 3.11 brings a setuptools older than torch wants, which would stand before Noria's.
    _run([*_pip(folder), "uninstall", "--yes", "--quiet", "setuptools"], f"no pip in {folder}")
    _add_fallback_paths(folder, expected.fallback_paths)
    log_status(f"installing {expected.requirement}")
    _pip_install(folder, expected.requirement)
    _check_shared(folder)
    (folder / _MARKER).write_bytes(msgspec.json.encode(expected))
    log_status(f"{expected.requirement} is installed in {folder}")


def constraints() -> list[str]:
    """The versions that a peer has to do with, as pip reads them: those of the environment that Noria runs in."""
    return [f"{name}=={importlib.metadata.version(name)}" for name in _SHARED_PACKAGES]


def versions_of(peer: str) -> dict[str, str]:
    """What pip installed for it, by name; nothing where it is not installed."""
    directories = [str(directory) for directory in (folder_of(peer) / "lib").glob("python*/site-packages")]
    return {found.name: found.version for found in importlib.metadata.distributions(path=directories)}


def _expected_marker(peer: str) -> _EnvironmentMarker:
    directories = [*site.getsitepackages(), site.getusersitepackages()]
    return _EnvironmentMarker(
        REQUIREMENTS[peer], sys.version, tuple(directory for directory in directories if directory in sys.path)
    )


def _is_installed(peer: str) -> bool:
    try:
        marker = msgspec.json.decode((folder_of(peer) / _MARKER).read_bytes(), type=_EnvironmentMarker)
    except (OSError, msgspec.DecodeError):
        return False
    return marker == _expected_marker(peer) and _python_in(folder_of(peer)).is_file()


def _python_in(folder: pathlib.Path) -> pathlib.Path:
    return folder / "bin" / "python"


def _pip(folder: pathlib.Path) -> list[str]:
    return [str(_python_in(folder)), "-m", "pip", "--no-input", "--disable-pip-version-check"]


def _add_fallback_paths(folder: pathlib.Path, paths: Sequence[str]) -> None:
    """Have its Python search `behind` last; addsitedir also follows what is installed there as editable."""
    (packages,) = (folder / "lib").glob("python*/site-packages")
    lines = [f"import site; site.addsitedir({path!r})\n" for path in paths]
    (packages / "noria.pth").write_text("".join(lines))


def _pip_install(folder: pathlib.Path, requirement: str) -> None:
    with tempfile.NamedTemporaryFile("w", prefix="noria-constraints-", suffix=".txt") as file:
        file.write("\n".join(constraints()))
        file.flush()
        _run(
            [*_pip(folder), "install", "--constraint", file.name, requirement],
            f"pip could not install {requirement}; it needs a network, or a mirror in PIP_INDEX_URL",
        )


def _check_shared(folder: pathlib.Path) -> None:
    """Raises ConfigError when something that draws is not Noria's own."""
    script = "import importlib.metadata as m, sys; print(*(n + '==' + m.version(n) for n in sys.argv[1:]), sep='\\n')"
    found = _run(
        [str(_python_in(folder)), "-c", script, *_SHARED_PACKAGES], f"{folder} does not see Noria's environment"
    ).splitlines()
    if different := sorted(set(found) - set(constraints())):
        raise ConfigError(
            f"{folder} would draw with {', '.join(different)}, Noria draws with {', '.join(constraints())}"
        )


def _run(command: list[str], problem: str) -> str:
    """What `command` prints; raises ConfigError with `problem` and its last lines when it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        last = "\n".join(done.stdout.splitlines()[-_LAST_LINES:])
        raise ConfigError(f"{problem}. Its last words:\n{last}")
    return done.stdout
