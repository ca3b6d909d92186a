"""Pythons with other people's programs, each in an environment of its own: their requirements are not Noria's.

An environment lies in the user's cache and is made once, by pip, which takes minutes; of several test runs one makes
it, and the others wait.
"""

import fcntl
import os
import pathlib
import subprocess
import sysconfig
import venv

# Read at import, before a fixture gives the tests a cache of their own.
_CACHE_HOME = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
_SOURCES = pathlib.Path(__file__).parent.parent / "src"


def environment_python(name: str, *requirements: str) -> pathlib.Path:
    """Return the interpreter of the environment `name` with `requirements`, which is made if there is none."""
    folder = _CACHE_HOME / "noria" / "test-environments" / name
    python, marker = folder / "bin" / "python", folder / "requirements"
    wanted = "\n".join(requirements)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel releases it when this process ends
        if not marker.exists() or marker.read_text() != wanted:
            venv.create(folder, clear=True, with_pip=True)
            pip = [str(python), "-m", "pip", "install", "--quiet", "--no-compile", *requirements]
            subprocess.run(pip, check=True, stdout=subprocess.DEVNULL)  # sys.stderr has no descriptor in a test
            marker.write_text(wanted)
    return python


def ray_python() -> pathlib.Path:
    """Return the interpreter of the environment with Ray, which finds Noria and what it needs, too."""
    python = environment_python("ray", "ray[serve]==2.60.0")
    (packages,) = python.parent.parent.glob("lib/python*/site-packages")
    (packages / "noria.pth").write_text(f"{_SOURCES}\n{sysconfig.get_paths()['purelib']}\n")
    return python
