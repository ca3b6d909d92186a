"""`noria registry`: backs up, restores and checks the registry."""

import argparse
import pathlib
import time
from typing import Any

from noria.cli.parser import Parser, add_command
from noria.cli.registry.common import add_json_flag, add_registry_settings, as_json, registry_of
from noria.observe.terminal_text import escape_for_terminal


def add_to(commands: Any) -> list[Parser]:
    """Add the commands; returns their parsers."""
    registry = commands.add_parser("registry", help="back up, restore and check the registry")
    subcommands = registry.add_subparsers(metavar="COMMAND", required=True)
    backup = add_command(subcommands, "backup", run_backup, "FILE", "write all of the registry to a file")
    backup.add_argument("file", metavar="FILE", type=pathlib.Path, help="a new file")
    restore = add_command(subcommands, "restore", run_restore, "FILE", "fill an empty registry from a backup")
    restore.add_argument("file", metavar="FILE", type=pathlib.Path, help="a backup")
    check = add_command(subcommands, "check", run_check, "", "check the registry and the files of its models")
    check.add_argument("--no-files", action="store_true", help="do not read the files of models")
    parsers = [backup, restore, check]
    for parser in parsers:
        add_json_flag(parser)
        add_registry_settings(parser)
    return parsers


def run_backup(arguments: argparse.Namespace) -> int:
    """Write all of the registry, as of one instant, to a file. The server may run meanwhile.

    The files of models are not in it: their SHA-256 are.
    """
    from noria.registry.backup import backup

    with registry_of(arguments) as engine:
        num_rows = backup(engine, arguments.file, time.time())
    _report(arguments, "wrote", num_rows)
    return 0


def run_restore(arguments: argparse.Namespace) -> int:
    """Fill an empty registry from a backup, all or nothing. It may be another kind of database than it was."""
    from noria.registry.backup import restore

    with registry_of(arguments) as engine:
        num_rows = restore(engine, arguments.file)
    _report(arguments, "restored", num_rows)
    return 0


def run_check(arguments: argparse.Namespace) -> int:
    """Check the database, all digests, that what is derived follows from its history, and the files of models.

    Prints a line for each thing that is wrong, and exits with 1 if there is one.
    """
    from noria.registry.check import check

    status = 0
    with registry_of(arguments) as engine:
        for finding in check(engine, with_files=not arguments.no_files):
            print(as_json({"finding": finding}) if arguments.json else escape_for_terminal(finding))
            status = 1
    if not status and not arguments.json:
        print("ok")
    return status


def _report(arguments: argparse.Namespace, verb: str, num_rows: int) -> None:
    if arguments.json:
        print(as_json({"file": str(arguments.file), "num_rows": num_rows}))
    else:
        print(f"{verb} {num_rows} rows {'to' if verb == 'wrote' else 'from'} {arguments.file}")
