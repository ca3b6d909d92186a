"""Commands of other distributions, found through entry points: `noria bench` of noria-bench.

An entry point of the group `noria.cli` is named like its command. It is a function that gets argparse's subparsers,
adds the command, and returns its parsers. A plugin that cannot be imported fails only its own command.
"""

import argparse
import functools
import importlib.metadata
from typing import Any

from noria.cli.parser import Parser
from noria.errors import ConfigError

ENTRY_POINT_GROUP = "noria.cli"
_BENCH_COMMANDS = ("bench", "simulate")


def add_to(commands: Any) -> list[Parser]:
    """Add the commands of all entry points; returns their parsers.

    Without noria-bench, its commands say how to install it.
    """
    entry_points = importlib.metadata.entry_points(group=ENTRY_POINT_GROUP)
    for name in _BENCH_COMMANDS:
        if name not in entry_points.names:
            _add_unavailable(
                commands, name, "it is not installed: pip install 'noria-serve[bench]' (in a checkout: make setup)"
            )
    parsers: list[Parser] = []
    for entry_point in entry_points:
        try:
            add_command = entry_point.load()
        except Exception as error:  # code of another distribution, perhaps of another version
            _add_unavailable(commands, entry_point.name, f"{entry_point.value} cannot be imported: {error}")
        else:
            parsers += add_command(commands)
    return parsers


def _add_unavailable(commands: Any, name: str, reason: str) -> None:
    """Add a command that takes any arguments and raises ConfigError."""
    parser = commands.add_parser(name, help="not available", description=f"noria {name} is not available: {reason}.")
    run = functools.partial(_report_unavailable, message=f"noria {name} is not available: {reason}.")
    parser.set_defaults(run=run, parser=parser, ignores_unknown_arguments=True)


def _report_unavailable(_: argparse.Namespace, message: str) -> int:
    raise ConfigError(message)
