"""The provenance of a result: machine, commit, versions, command and date."""

import datetime
import importlib.metadata
import os
import pathlib
import platform
import subprocess
import sys
from typing import Any

import noria
from noria.observe.cpuinfo import cpu_model

_VERSIONS = (
    "torch",
    "diffusers",
    "transformers",
    "starlette",
    "fastapi",
    "uvicorn",
    "pyzmq",
    "msgspec",
    "pillow",
    "httpx",
    "onnxruntime",
    "openvino",
    "tokenizers",
)


def collect_provenance() -> dict[str, Any]:
    """The provenance of a measurement by this process, JSON-ready."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": _command(),
        "noria": noria.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "versions": {name: version for name in _VERSIONS if (version := _version(name)) is not None},
        "machine": {
            "cpu": cpu_model(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            "load_average_before": os.getloadavg()[0],
        },
    }


def _command() -> str:
    """The command as it can be typed again, without the interpreter's path."""
    if sys.orig_argv[1:2] == ["-m"] and sys.orig_argv[2] != "noria":
        return " ".join(["python", *sys.orig_argv[1:]])
    return " ".join(["noria", *sys.argv[1:]])


def _version(name: str) -> str | None:
    """The version of a distribution; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    """The checkout's commit, with `-dirty` if the tree differs; None outside a checkout."""
    folder = pathlib.Path(__file__).parent
    try:
        described = subprocess.run(  # git, from PATH, as the developer has it
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return described.stdout.strip()
