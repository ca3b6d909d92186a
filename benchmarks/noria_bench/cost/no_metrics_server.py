"""A server that counts nothing: `python -m noria_bench.cost.no_metrics_server SERVE_ARGUMENTS…`, what `noria bench cost` holds the real one against.

The product has no switch for this, and needs none. Children are started through this module, which puts objects that do nothing in the
places of the metrics and then runs the child's own main; so they do all else that the real ones do.
"""

import contextlib
import functools
import runpy
import sys
from collections.abc import Sequence
from typing import Any

from prometheus_client.metrics import MetricWrapperBase

from noria.observe.metrics import declarations, exposition
from noria.supervisor.child_process import ChildKind

_CHILDREN: tuple[ChildKind, ...] = ("engine", "frontend")


class NullMetric:
    """In a metric's place."""

    def labels(self, *_: str, **__: str) -> "NullMetric":
        """Itself, whatever the labels."""
        return self

    def inc(self, amount: float = 1) -> None:
        """Nothing."""

    def dec(self, amount: float = 1) -> None:
        """Nothing."""

    def set(self, value: float) -> None:
        """Nothing."""

    def observe(self, amount: float) -> None:
        """Nothing."""

    def track_inprogress(self) -> "contextlib.nullcontext[None]":
        """Nothing."""
        return contextlib.nullcontext()


def disable_metrics() -> None:
    """Count nothing in this process from now on; before the modules that count are imported."""
    for name, value in list(vars(declarations).items()):
        if isinstance(value, MetricWrapperBase):
            setattr(declarations, name, NullMetric())
    setattr(exposition, "observe", _ignore_observation)  # noqa: B010 - another signature, that takes anything


def _ignore_observation(*_: object) -> None:
    pass


def command_of(kind: ChildKind, text: str) -> list[str]:
    """How the supervisor starts silent children."""
    return [sys.executable, "-m", "noria_bench.cost.no_metrics_server", kind, text]


def main(arguments: Sequence[str]) -> int:
    """Serve as `noria serve ARGUMENTS` does, or be one of that server's children."""
    if arguments[0] in _CHILDREN:
        disable_metrics()
        sys.argv[1:] = arguments[1:]
        runpy.run_module(f"noria.{arguments[0]}.process", run_name="__main__", alter_sys=True)
        return 0
    from noria.cli import main as cli
    from noria.supervisor import supervisor

    supervisor_module: Any = supervisor
    supervisor_module.serve = functools.partial(supervisor.serve, build_command=command_of)
    return cli.main(["serve", *arguments])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
