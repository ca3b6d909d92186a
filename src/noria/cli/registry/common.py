"""The parts that the commands of the registry share: its settings, who asks, tables and times as text, JSON."""

import contextlib
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from noria.cli.parser import Parser, add_settings, config_from
from noria.errors import RegistryError
from noria.observe.terminal_text import escape_for_terminal, escape_in_json

if TYPE_CHECKING:
    import argparse

    from sqlalchemy import Engine
    from sqlalchemy.engine.url import URL

    from noria.registry.changes import Change
    from noria.registry.lineage.trace import Graph
    from noria.registry.manifest import OnRead

_SHOWN_AFTER_S, _LINE_INTERVAL_S = 1.0, 10.0
_OTHER_REGISTRY_HINT = " Give the server's --data-dir FOLDER or --registry-database URL."


def add_registry_settings(parser: Parser) -> None:
    """Add the flags that say where the registry is."""
    add_settings(parser, "data_dir", "registry.database")


def add_json_flag(parser: "Parser | argparse._MutuallyExclusiveGroup") -> None:
    """Add --json."""
    parser.add_argument("--json", action="store_true", help="JSON for programs, one object a line")


@contextlib.contextmanager
def registry_of(
    arguments: "argparse.Namespace", *, if_missing: Literal["empty", "create", "reject"] = "empty"
) -> "Iterator[Engine]":
    """Open the registry that the settings name, and close it. Errors name it.

    If its file does not exist, the registry is an empty one that nothing keeps, is created, or it is an error.

    Raises:
        ConfigError: it cannot be opened.
        RegistryError: it does not have what is asked for, or the database failed later.
    """
    from sqlalchemy.exc import DBAPIError

    from noria.registry.schema import open_registry, open_registry_database, registry_url

    config = config_from(arguments)
    url = registry_url(config)
    with contextlib.ExitStack() as opened:
        is_there = url.drivername != "sqlite" or os.path.exists(url.database or "")
        if is_there or if_missing == "create":
            engine = open_registry(config)
        elif if_missing == "reject":
            raise RegistryError(f"there is no registry {_place(url)}.{_OTHER_REGISTRY_HINT}")
        else:
            folder = opened.enter_context(tempfile.TemporaryDirectory(prefix="noria-"))
            engine = open_registry_database("auto", pathlib.Path(folder))
        opened.callback(engine.dispose)
        try:
            yield engine
            if not is_there and if_missing == "empty":
                print(f"there is no registry {_place(url)}.{_OTHER_REGISTRY_HINT}", file=sys.stderr)
        except DBAPIError as error:
            reason = str(error.orig).strip().partition("\n")[0]
            raise RegistryError(f"the registry's database failed: {reason}. Try again.") from error
        except TimeoutError as error:
            raise RegistryError(f"the registry is in use: {error}. Try again.") from error
        except RegistryError as error:
            absent = "" if is_there else ", which does not exist"
            raise RegistryError(f"{error.message} (Registry: {_place(url)}{absent}.)") from error


def print_use(arguments: "argparse.Namespace") -> None:
    """Say on stderr which registry has changed, and whether a server follows it."""
    from noria.registry.schema import registry_url
    from noria.registry.watching import is_watched

    url = registry_url(config_from(arguments))
    uses = {
        True: "a server follows it",
        False: "no server on this machine follows it: start one with the same data_dir or registry.database",
        None: "servers with the same registry.database follow it",
    }
    print(f"registry {_place(url)}: {uses[is_watched(url)]}", file=sys.stderr)


def _place(url: "URL") -> str:
    is_file = url.drivername == "sqlite"
    return escape_for_terminal(os.path.abspath(url.database or "") if is_file else url.render_as_string())


def change_of(arguments: "argparse.Namespace") -> "Change":
    """Return who asks for a change, now, and why."""
    from noria.registry.changes import Change
    from noria.registry.model_store import user_name

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


@contextlib.contextmanager
def show_reading() -> "Iterator[OnRead]":
    """Yield what shows on stderr how much of a folder's files is read, after a second: on a terminal a bar, else lines.

    A line comes every ten seconds.
    """
    from tqdm import tqdm

    with tqdm(unit="B", unit_scale=True, desc="reading", leave=False, disable=None, delay=_SHOWN_AFTER_S) as bar:
        line_at = time.monotonic() + _LINE_INTERVAL_S

        def show(num_read: int, num_bytes: int) -> None:
            nonlocal line_at
            if not bar.disable:
                if bar.total != num_bytes:
                    bar.reset(num_bytes)
                bar.update(num_read - bar.n)
            elif time.monotonic() >= line_at:
                line_at += _LINE_INTERVAL_S
                print(f"read {format_size(num_read)} of {format_size(num_bytes)}", file=sys.stderr)

        yield show


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
