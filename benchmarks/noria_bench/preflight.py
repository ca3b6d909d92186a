"""What a bench needs besides Noria, looked for before anything is measured: better now than after twenty minutes."""

import importlib.util
from collections.abc import Iterable

from noria.errors import ConfigError
from noria_bench.targets import environments
from noria_bench.targets.catalog import Target


def check_installed(*names: str) -> None:
    """Raises ConfigError where one of these packages cannot be imported."""
    if missing := [name for name in names if importlib.util.find_spec(name) is None]:
        raise ConfigError(
            f"this bench needs {', '.join(missing)}, which is not installed. Install Noria with its extra: pip install 'noria-serve[bench]'."
        )


def check_peers(targets: Iterable[Target]) -> None:
    """Raises ConfigError where the virtual environment of one of them is not installed."""
    for target in targets:
        if target.peer is not None:
            environments.python_of(target.peer)
