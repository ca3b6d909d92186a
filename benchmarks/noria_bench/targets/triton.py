"""A real Triton Inference Server: where it is installed, and how it serves models of its Python backend.

The server is that of the wheel nvidia-pytriton, whose own module is not used. It is in the environment of `noria bench
install triton`; or, where nothing can be installed, in a folder into which the wheel was unpacked:

    TRITON_FOLDER   that folder
    TRITON_PYTHON   an interpreter with numpy below 2, onnxruntime and tokenizers, for models with string inputs
"""

import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

import msgspec

import noria_bench
from noria.errors import ConfigError
from noria_bench.targets import environments

_SERVER = pathlib.Path("pytriton/tritonserver/bin/tritonserver")


@dataclass(frozen=True)
class Triton:
    """An installation; `python` has an older numpy, which models with string inputs need (None: there is none)."""

    packages: pathlib.Path  # the folder of `pytriton` and `nvidia_pytriton.libs`
    python: str | None


def find_triton() -> Triton:
    """The Triton that the environment variables name, or the installed one.

    Raises:
        ConfigError: there is none.

    """
    if folder := os.environ.get("TRITON_FOLDER"):
        packages, interpreter = pathlib.Path(folder).resolve(), os.environ.get("TRITON_PYTHON") or None
        if not (packages / _SERVER).is_file():
            raise ConfigError(
                f"TRITON_FOLDER is {folder}, which has no {_SERVER}; name the folder into which the wheel of "
                "nvidia-pytriton was unpacked."
            )
        if interpreter is not None and shutil.which(interpreter) is None:
            raise ConfigError(f"TRITON_PYTHON is {interpreter}, which is no program; name a Python interpreter.")
        return Triton(packages, interpreter)
    python = environments.python_of("triton")
    (packages,) = (python.parents[1] / "lib").glob("python*/site-packages")
    return Triton(packages, str(python))


def model_code(module: str, name: str = "TritonPythonModel", *, isolated: bool) -> str:
    """A `model.py` with the `TritonPythonModel` that `module` calls `name`; its interpreter ignores PYTHONPATH.

    The model finds what this process finds, in the same order; an isolated one finds its own interpreter's packages,
    and the benches.
    """
    paths = [str(pathlib.Path(noria_bench.__file__).parents[1])] if isolated else [path for path in sys.path if path]
    place = "len(sys.path):" if isolated else ":0"
    return f"import sys\n\nsys.path[{place}] = {paths!r}\nfrom {module} import {name} as TritonPythonModel\n"


def job_parameter(job_json: bytes) -> str:
    """The lines of a `config.pbtxt` that hand a job to a model of the Python backend.

    JSON strings are escaped as protobuf's text format reads them.
    """
    text = msgspec.json.encode(job_json.decode()).decode()
    return f'backend: "python"\nparameters {{ key: "job" value {{ string_value: {text} }} }}\n'


def serve_models(triton: Triton, python: str, files: Mapping[str, str], folder: pathlib.Path, port: int) -> NoReturn:
    """Write a repository of models into `folder`, serve it on loopback, and exit with the server's status.

    The models take the packages of `python`.
    """
    for path, content in files.items():
        file = folder / "models" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, encoding="utf-8")
    home, backends = triton.packages / "pytriton" / "tritonserver", folder / "backends"
    shutil.copytree(home / "backends", backends)
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    shutil.copy(home / "python_backend_stubs" / version / "triton_python_backend_stub", backends / "python")
    command = [
        str(triton.packages / _SERVER),
        *(f"--model-repository={folder / 'models'}", f"--backend-directory={backends}", "--log-info=false"),
        *("--http-address=127.0.0.1", f"--http-port={port}", "--reuse-http-port=true"),
        # Else each model is loaded once more, to ask for its inputs.
        "--disable-auto-complete-config",
        *("--allow-grpc=false", "--allow-metrics=false", "--exit-timeout-secs=1"),
    ]
    libraries = [_own_library(folder), triton.packages / "nvidia_pytriton.libs", os.environ.get("LD_LIBRARY_PATH", "")]
    environment = os.environ | {
        "LD_LIBRARY_PATH": os.pathsep.join(str(each) for each in libraries if each),
        "PATH": f"{pathlib.Path(python).parent}{os.pathsep}{os.environ.get('PATH', '')}",
    }
    sys.exit(subprocess.run(command, env=environment, check=False).returncode)


def _own_library(folder: pathlib.Path) -> pathlib.Path:
    """A folder with a link to this Python's library, if it has one.

    Modules of the standard library do not load into the library of another patch release. The rest of the library's
    own folder must not come before what the models' packages bring.
    """
    name = str(sysconfig.get_config_var("INSTSONAME"))
    library, links = pathlib.Path(str(sysconfig.get_config_var("LIBDIR"))) / name, folder / "lib"
    links.mkdir()
    if ".so" in name and library.exists():
        (links / name).symlink_to(library)
    return links
