"""A server without metrics, the baseline of `noria bench cost`: `python -m noria_bench.cost.no_metrics_server
SERVE_ARGUMENTS…`.

Noria has no setting for it. Its processes are started through this module, which replaces the metrics by objects that
do nothing and then runs the process's own main, so that all else is unchanged.
"""

import contextlib
import functools
import runpy
import sys
from collections.abc import Sequence
from typing import Any

from prometheus_client.metrics import MetricWrapperBase

from noria.observe.metrics import declarations, exposition, section
from noria.supervisor.child_process import ChildKind

_CHILDREN: tuple[ChildKind, ...] = ("engine", "frontend", "registrar")


class NullMetric:
    """Replaces a metric and does nothing."""

    def labels(self, *_: str, **__: str) -> "NullMetric":
        """Return itself."""
        return self

    def inc(self, amount: float = 1) -> None:
        """Do nothing."""

    dec = set = observe = inc

    def track_inprogress(self) -> "contextlib.nullcontext[None]":
        """Return a context manager that does nothing."""
        return contextlib.nullcontext()


def disable_metrics() -> None:
    """Replace all metrics of this process; call it before the modules that use them are imported."""
    for name, value in list(vars(declarations).items()):
        if isinstance(value, MetricWrapperBase):
            setattr(declarations, name, NullMetric())
    for module, name in ((section, "add_all"), (exposition, "keep_exemplar")):
        setattr(module, name, _do_nothing)


def _do_nothing(*_: object) -> None:
    pass


def command_of(kind: ChildKind, text: str) -> list[str]:
    """The command by which the supervisor starts a process without metrics."""
    return [sys.executable, "-m", "noria_bench.cost.no_metrics_server", kind, text]


def main(arguments: Sequence[str]) -> int:
    """Serve as `noria serve ARGUMENTS` does, or run one of that server's processes."""
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
