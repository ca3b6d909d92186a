"""A Python with MLflow, in an environment of its own: its requirements are not Noria's, and importing it takes seconds.

It is the environment that NORIA_MLFLOW names, or one in the user's cache, which is made once: pip takes minutes.
"""

import os
import pathlib
import subprocess
import sys
import venv

# Newer ones do not install beside the packages of 2026-11.
REQUIREMENT = "mlflow==3.17.2"
# Read at import, before a fixture gives the tests a cache of their own.
_CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
_FOLDER = pathlib.Path(os.environ.get("NORIA_MLFLOW") or _CACHE / "noria" / REQUIREMENT.replace("==", "-"))


def mlflow_python():
    """Return the interpreter; makes the environment if there is none."""
    python, marker = _FOLDER / "bin" / "python", _FOLDER / "complete"
    if "NORIA_MLFLOW" not in os.environ and not marker.exists():
        venv.create(_FOLDER, clear=True, with_pip=True)
        subprocess.run(
            [python, "-m", "pip", "install", "--quiet", "--no-compile", REQUIREMENT], check=True, stdout=sys.stderr
        )
        marker.touch()
    return python
