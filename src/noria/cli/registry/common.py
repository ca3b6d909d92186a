"""What the commands of the registry share: its settings, who asks, tables and times as text, JSON."""

import contextlib
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec

from noria.cli.parser import Parser, add_settings, config_from
from noria.errors import RegistryError
from noria.observe.terminal_text import escape_for_terminal, escape_in_json
from noria.settings import list_settings

if TYPE_CHECKING:
    import argparse

    from sqlalchemy import Engine

    from noria.registry.lineage.trace import Graph
    from noria.registry.versions import Change

_SETTINGS = ("data_dir", "registry.database")


def add_registry_settings(parser: Parser) -> None:
    """Add the flags that say where the registry is."""
    add_settings(parser, [setting for setting in list_settings() if setting.key in _SETTINGS])


def add_json_flag(parser: "Parser | argparse._MutuallyExclusiveGroup") -> None:
    """Add --json."""
    parser.add_argument("--json", action="store_true", help="JSON for programs, one object a line")


@contextlib.contextmanager
def registry_of(arguments: "argparse.Namespace") -> "Iterator[Engine]":
    """Open the registry that the settings name, and close it.

    Raises:
        ConfigError: it cannot be opened.
        RegistryError: the database failed later.

    """
    from sqlalchemy.exc import DBAPIError

    from noria.registry.schema import open_registry

    engine = open_registry(config_from(arguments))
    try:
        yield engine
    except DBAPIError as error:
        reason = str(error.orig).strip().partition("\n")[0]
        raise RegistryError(f"the registry's database failed: {reason}. Try again.") from error
    finally:
        engine.dispose()


def change_of(arguments: "argparse.Namespace") -> "Change":
    """Return who asks for a change, now, and why."""
    from noria.registry.model_store import user_name
    from noria.registry.versions import Change

    return Change(time.time(), user_name(), arguments.why)


def add_why_flag(parser: Parser) -> None:
    """Add --why."""
    parser.add_argument("--why", metavar="TEXT", default="", help="the reason, which is kept with the change")


def format_time(at: float) -> str:
    """Return a Unix time to the minute."""
    return datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC")


def format_size(num_bytes: int) -> str:
    """Return a size with three digits."""
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes} B"


def format_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return rows below their header, in columns; control characters are escaped."""
    cells = [list(header), *([escape_for_terminal(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = ["  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)) for row in cells]
    return "\n".join(line.rstrip() for line in lines)


def as_json(value: Any) -> str:
    """Return a value as one line of JSON; control characters are escaped."""
    return escape_in_json(msgspec.json.encode(value).decode())


def warn_if_cut(*graphs: "Graph") -> None:
    """Say on stderr that a trace is not complete, if one is not: what is printed of it does not say so."""
    if any(graph.is_cut for graph in graphs):
        num_nodes = max(len(graph.nodes) for graph in graphs)
        print(
            f"the trace is cut: only {num_nodes} runs, models and data are in it, and there are more", file=sys.stderr
        )
