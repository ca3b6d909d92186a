"""Other people's programs, each in an environment of its own: their requirements are not Noria's.

An environment lies in the user's cache and is made once, by pip or npm, which takes minutes; of several test runs one
makes it, and the others wait.
"""

import contextlib
import fcntl
import os
import pathlib
import shutil
import subprocess
import sysconfig
import venv
from collections.abc import Iterator

# Read at import, before a fixture gives the tests a cache of their own.
_CACHE_HOME = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
_SOURCES = pathlib.Path(__file__).parent.parent / "src"


def environment_python(name: str, *requirements: str) -> pathlib.Path:
    """Return the interpreter of the environment `name` with `requirements`, which is made if there is none."""
    with _unless_made(name, requirements) as (folder, must_make):
        python = folder / "bin" / "python"
        if must_make:
            venv.create(folder, clear=True, with_pip=True)
            pip = [str(python), "-m", "pip", "install", "--quiet", "--no-compile", *requirements]
            subprocess.run(pip, check=True, stdout=subprocess.DEVNULL)  # sys.stderr has no descriptor in a test
    return python


def node_folder(name: str, *packages: str) -> pathlib.Path:
    """Return a folder whose `node_modules` has `packages`, which is made if there is none."""
    with _unless_made(f"{name}-node", packages) as (folder, must_make):
        if must_make:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            npm = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder), *packages]
            subprocess.run(npm, check=True, stdout=subprocess.DEVNULL)
    return folder


@contextlib.contextmanager
def _unless_made(name: str, requirements: tuple[str, ...]) -> Iterator[tuple[pathlib.Path, bool]]:
    """Yield the folder of an environment, and whether it has to be made, which no other process does meanwhile."""
    folder, wanted = _CACHE_HOME / "noria" / "test-environments" / name, "\n".join(requirements)
    marker = folder / "requirements"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel releases it when this process ends
        must_make = not marker.exists() or marker.read_text() != wanted
        yield folder, must_make
        if must_make:
            marker.write_text(wanted)


def ray_python() -> pathlib.Path:
    """Return the interpreter of the environment with Ray, which finds Noria and what it needs, too."""
    python = environment_python("ray", "ray[serve]==2.60.0")
    (packages,) = python.parent.parent.glob("lib/python*/site-packages")
    (packages / "noria.pth").write_text(f"{_SOURCES}\n{sysconfig.get_paths()['purelib']}\n")
    return python
