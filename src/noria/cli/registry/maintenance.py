"""`noria registry`: backs up, restores and checks the registry, and corrects its lineage."""

import argparse
import pathlib
import time
from typing import Any

from noria.cli.parser import Parser, add_command
from noria.cli.registry.common import (
    add_json_flag,
    add_registry_settings,
    add_why_flag,
    as_json,
    change_of,
    format_table,
    format_time,
    registry_of,
    show_reading,
)
from noria.observe.terminal_text import escape_for_terminal


def add_to(commands: Any) -> list[Parser]:
    """Add the commands; returns their parsers."""
    registry = commands.add_parser("registry", help="back up, restore, check and correct the registry")
    subcommands = registry.add_subparsers(metavar="COMMAND", required=True)
    backup = add_command(subcommands, "backup", run_backup, "FILE", "write all of the registry to a file")
    backup.add_argument("file", metavar="FILE", type=pathlib.Path, help="a new file")
    restore = add_command(subcommands, "restore", run_restore, "FILE", "fill an empty registry from a backup")
    restore.add_argument("file", metavar="FILE", type=pathlib.Path, help="a backup")
    check = add_command(subcommands, "check", run_check, "", "check the registry and the files of its models")
    check.add_argument("--no-files", action="store_true", help="do not read the files of models")
    events = add_command(subcommands, "events", run_events, "[RUN]", "list lineage events and who sent them")
    events.add_argument("run_id", metavar="RUN", nargs="?", help="the id of a run; default: the latest of all")
    events.add_argument("--limit", metavar="N", type=int, default=100, help="how many (100), the newest first")
    strike = add_command(subcommands, "strike-out", run_strike_out, "WHAT", "let lineage events count no more")
    strike.add_argument("what", metavar="WHAT", help="the id of a run, or sha256:DIGEST of one event")
    add_why_flag(strike)
    parsers = [backup, restore, check, events, strike]
    for parser in parsers:
        add_json_flag(parser)
        add_registry_settings(parser)
    return parsers


def run_backup(arguments: argparse.Namespace) -> int:
    """Write all of the registry, as of one instant, to a file. The server may run meanwhile.

    The files of models are not in it: their SHA-256 are.
    """
    from noria.registry.backup import backup

    with registry_of(arguments, if_missing="reject") as engine:
        num_rows = backup(engine, arguments.file, time.time())
    _report(arguments, "wrote", num_rows)
    return 0


def run_restore(arguments: argparse.Namespace) -> int:
    """Fill an empty registry from a backup, all or nothing. It may be another kind of database than it was."""
    from noria.registry.backup import restore

    with registry_of(arguments, if_missing="create") as engine:
        num_rows = restore(engine, arguments.file)
    _report(arguments, "restored", num_rows)
    return 0


def run_check(arguments: argparse.Namespace) -> int:
    """Check the database, all digests, that what is derived follows from its history, and the files of models.

    Prints a line for each thing that is wrong, and exits with 1 if there is one.
    """
    from noria.registry.check import check

    status = 0
    with registry_of(arguments, if_missing="reject") as engine, show_reading() as on_read:
        for finding in check(engine, with_files=not arguments.no_files, on_read=on_read):
            print(as_json({"finding": finding}) if arguments.json else escape_for_terminal(finding))
            status = 1
    if not status and not arguments.json:
        print("ok")
    return status


def run_events(arguments: argparse.Namespace) -> int:
    """List the lineage events of a run, or the latest of all, with their digests and who sent them."""
    from noria.registry.lineage.struck_events import list_events

    with registry_of(arguments) as engine, engine.connect() as connection:
        found = list_events(connection, arguments.run_id, None, max(1, arguments.limit))
    if arguments.json:
        print(as_json(found))
        return 0
    rows = [
        (format_time(row.at), row.sender, row.run_id or "", row.digest, "struck out" if row.struck_out else "")
        for row in found.data
    ]
    print(format_table(("AT", "SENDER", "RUN", "EVENT", ""), rows))
    return 0


def run_strike_out(arguments: argparse.Namespace) -> int:
    """Let all events of a run, or one event, count no more. They stay, and traces say who struck them out and why."""
    from noria.registry.lineage.struck_events import strike_out

    with registry_of(arguments) as engine:
        struck = strike_out(engine, arguments.what, change_of(arguments))
    print(as_json(struck) if arguments.json else f"struck out {len(struck.digests)} events")
    return 0


def _report(arguments: argparse.Namespace, verb: str, num_rows: int) -> None:
    if arguments.json:
        print(as_json({"file": str(arguments.file), "num_rows": num_rows}))
    else:
        print(f"{verb} {num_rows} rows {'to' if verb == 'wrote' else 'from'} {arguments.file}")
