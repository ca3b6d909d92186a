"""The Python in which Ray is installed, and Noria is found."""

import pathlib
import sysconfig

from python_environment import environment_python

_SOURCES = pathlib.Path(__file__).parents[2] / "src"


def ray_python() -> pathlib.Path:
    """Return the interpreter of an environment with Ray; pip makes it, which takes minutes the first time."""
    python = environment_python("ray", "ray[serve]==2.60.0")
    (packages,) = python.parent.parent.glob("lib/python*/site-packages")
    (packages / "noria.pth").write_text(f"{_SOURCES}\n{sysconfig.get_paths()['purelib']}\n")
    return python
