"""The virtual environments of the frameworks: `noria bench install FRAMEWORK` creates one, and a bench runs the
framework's server in it.

Each is layered (ADR 11): first what pip installed for the framework, then all of the environment that Noria runs in. So
every target uses the same files of torch, diffusers, transformers and Noria, and a framework's requirements cannot
change Noria's packages. Triton's is isolated, since its packages need an older numpy: it sees nothing of Noria's
environment, and has what computes an encoder in Noria's versions.

A marker file, written last, says that an environment is complete and what it was created for.
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

# The newest versions in November 2026. All have wheels for Python 3.11 to 3.13.
REQUIREMENTS = {
    "litserve": "litserve==0.2.19",
    "bentoml": "bentoml==1.4.39",
    "ray": "ray[serve]==2.60.0",
    "triton": "nvidia-pytriton==0.7.0",  # the wheel that has the server, of version 2.51
    "infinity": "infinity-emb==0.0.78",
}

# What a framework imports whose own requirements contradict Noria's environment, though it works with that: Infinity
# wants numpy below 2 and sentence-transformers below 4. pip installs it and these without their requirements.
_IMPORTED = {
    "infinity": (
        "backoff==2.2.1",
        "distro==1.9.0",
        "orjson==3.13.0",
        "posthog==7.91.1",
        "prometheus-client==0.26.0",
        "prometheus-fastapi-instrumentator==8.1.0",
        "rich==15.0.0",
    )
}

# The isolated environments, with the packages that they have in Noria's versions.
_ISOLATED = {"triton": ("onnxruntime", "tokenizers")}

# What generates images: pip must not install a second copy, so that every target uses the same.
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
_MARKER = "noria-framework.json"
_LAST_LINES = 8


class _EnvironmentMarker(msgspec.Struct, frozen=True):
    """The requirement, Python and packages that an environment was created for; if one changes, it is created again."""

    requirement: str
    python: str
    fallback_paths: tuple[str, ...]  # search paths appended to those of a layered environment
    shared: tuple[str, ...] = ()  # what an isolated one has in Noria's versions


def folder_of(framework: str) -> pathlib.Path:
    """The folder of the framework's environment: `noria/frameworks/FRAMEWORK` in XDG_CACHE_HOME or ~/.cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(cache) / "noria" / "frameworks" / framework


def python_of(framework: str) -> pathlib.Path:
    """The Python interpreter of the framework's environment.

    Raises:
        ConfigError: it is not installed, incomplete, or created for another version, Python or environment of Noria.

    """
    if not _is_installed(framework):
        raise ConfigError(
            f"{framework} is not installed for this Noria; install it with: noria bench install {framework}"
        )
    return _python_in(folder_of(framework))


def install(framework: str, log_status: Callable[[str], None]) -> None:
    """Create the environment of `framework` unless it exists; `log_status` is called before each slow step.

    Raises:
        ConfigError: the environment cannot be created; the message ends with pip's last lines.

    """
    folder, expected = folder_of(framework), _expected_marker(framework)
    if _is_installed(framework):
        log_status(f"{expected.requirement} is installed in {folder}")
        return
    shutil.rmtree(folder, ignore_errors=True)
    log_status(f"creating a virtual environment in {folder}")
    _run([sys.executable, "-m", "venv", str(folder)], f"no virtual environment could be created in {folder}")
    # Python 3.11 installs a setuptools older than torch needs, which would come before Noria's.
    _run([*_pip(folder), "uninstall", "--yes", "--quiet", "setuptools"], f"no pip in {folder}")
    log_status(f"installing {expected.requirement}")
    if framework in _ISOLATED:
        _pip_install(folder, expected.requirement, *expected.shared)
    else:
        _add_fallback_paths(folder, expected.fallback_paths)
        imported = _IMPORTED.get(framework, ())
        options = ["--no-deps"] if imported else []
        _pip_install(folder, expected.requirement, *imported, *options, limits=constraints())
        _check_shared(folder)
    (folder / _MARKER).write_bytes(msgspec.json.encode(expected))
    log_status(f"{expected.requirement} is installed in {folder}")


def constraints() -> list[str]:
    """The shared packages, pinned to the versions of Noria's environment, as pip reads them."""
    return [f"{name}=={importlib.metadata.version(name)}" for name in _SHARED_PACKAGES]


def versions_of(framework: str) -> dict[str, str]:
    """The versions that pip installed for the framework, by name; empty if it is not installed."""
    directories = [str(directory) for directory in (folder_of(framework) / "lib").glob("python*/site-packages")]
    return {found.name: found.version for found in importlib.metadata.distributions(path=directories)}


def _expected_marker(framework: str) -> _EnvironmentMarker:
    if framework in _ISOLATED:
        shared = tuple(f"{name}=={importlib.metadata.version(name)}" for name in _ISOLATED[framework])
        return _EnvironmentMarker(REQUIREMENTS[framework], sys.version, (), shared)
    directories = [*site.getsitepackages(), site.getusersitepackages()]
    return _EnvironmentMarker(
        REQUIREMENTS[framework], sys.version, tuple(directory for directory in directories if directory in sys.path)
    )


def _is_installed(framework: str) -> bool:
    try:
        marker = msgspec.json.decode((folder_of(framework) / _MARKER).read_bytes(), type=_EnvironmentMarker)
    except (OSError, msgspec.DecodeError):
        return False
    return marker == _expected_marker(framework) and _python_in(folder_of(framework)).is_file()


def _python_in(folder: pathlib.Path) -> pathlib.Path:
    return folder / "bin" / "python"


def _pip(folder: pathlib.Path) -> list[str]:
    return [str(_python_in(folder)), "-m", "pip", "--no-input", "--disable-pip-version-check"]


def _add_fallback_paths(folder: pathlib.Path, paths: Sequence[str]) -> None:
    """Append `paths` to the search path of its Python; addsitedir also follows editable installations there."""
    (packages,) = (folder / "lib").glob("python*/site-packages")
    lines = [f"import site; site.addsitedir({path!r})\n" for path in paths]
    (packages / "noria.pth").write_text("".join(lines))


def _pip_install(folder: pathlib.Path, *requirements: str, limits: Sequence[str] = ()) -> None:
    with tempfile.NamedTemporaryFile("w", prefix="noria-constraints-", suffix=".txt") as file:
        file.write("\n".join(limits))
        file.flush()
        _run(
            [*_pip(folder), "install", "--constraint", file.name, *requirements],
            f"pip could not install {requirements[0]}; it needs a network, or a mirror in PIP_INDEX_URL",
        )


def _check_shared(folder: pathlib.Path) -> None:
    """Raises ConfigError if a shared package is not the one of Noria's environment."""
    script = "import importlib.metadata as m, sys; print(*(n + '==' + m.version(n) for n in sys.argv[1:]), sep='\\n')"
    found = _run(
        [str(_python_in(folder)), "-c", script, *_SHARED_PACKAGES], f"{folder} does not see Noria's environment"
    ).splitlines()
    if different := sorted(set(found) - set(constraints())):
        raise ConfigError(f"{folder} would use {', '.join(different)}; Noria uses {', '.join(constraints())}")


def _run(command: list[str], problem: str) -> str:
    """Return the output of `command`; raises ConfigError with `problem` and its last lines when it fails."""
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode != 0:
        last = "\n".join(done.stdout.splitlines()[-_LAST_LINES:])
        raise ConfigError(f"{problem}. The last lines of its output:\n{last}")
    return done.stdout
