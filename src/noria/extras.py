"""Optional packages: what needs one asks here, so that a missing one is an error that names its extra."""

import importlib
import importlib.util
from typing import Any

from noria.errors import MissingExtra


def check_installed(packages: tuple[str, ...], extra: str, purpose: str) -> None:
    """Check that `packages` are installed, without importing them. Raises MissingExtra: one is not."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            raise MissingExtra(
                f"{purpose} needs {package}, which is not installed: pip install 'noria-serve[{extra}]'."
            )


def require(package: str, extra: str, purpose: str) -> Any:
    """Import a package of an extra of noria-serve. Raises MissingExtra: it is not installed."""
    check_installed((package.partition(".")[0],), extra, purpose)
    return importlib.import_module(package)
