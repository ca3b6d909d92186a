"""The series of engines, which exist and start at 0 before an engine counts: no query sees a first increase from 1."""

from collections.abc import Sequence
from typing import get_args

from noria.observe.metrics import declarations
from noria.protocol.messages import ExitCause

_OOM_PHASES = ("evictions", "encodes", "joins", "steps", "decodes")  # scheduling.types.Phase, not to be imported here


def init_engine_series(names: Sequence[str]) -> None:
    """Export the series of the configured engines: none is up yet, and all counters start at 0."""
    declarations.ENGINES_CONFIGURED.set(len(names))
    for name in names:
        declarations.ENGINE_UP.labels(name).set(0)
        for counter in (
            declarations.ENGINE_BUSY_SECONDS,
            declarations.ITERATIONS,
            declarations.JOINS,
            declarations.EVICTIONS,
        ):
            counter.labels(name)
        for exit_cause in get_args(ExitCause):
            declarations.ENGINE_STARTS.labels(name, exit_cause)
        for phase in _OOM_PHASES:
            declarations.OUT_OF_MEMORY.labels(name, phase)
