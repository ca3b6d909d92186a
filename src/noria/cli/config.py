"""`noria config`: prints a configuration file, or the unit file of systemd."""

import argparse
from typing import Any

from noria.cli.parser import Parser, add_plain_command
from noria.errors import ConfigError
from noria.folders import shipped_folder
from noria.settings import example_file

_UNIT = "noria.service"


def add_to(commands: Any) -> list[Parser]:
    """Add the commands; returns their parsers."""
    config = commands.add_parser("config", help="print a configuration file, or the unit file of systemd")
    subcommands = config.add_subparsers(metavar="COMMAND", required=True)
    return [
        add_plain_command(subcommands, "example", run, "print a file with every setting"),
        add_plain_command(subcommands, "systemd", run_systemd, "print the unit file of systemd"),
    ]


def run(_: argparse.Namespace) -> int:
    """Print a TOML file for --config, with every setting in a comment: noria config example > noria.toml."""
    print(example_file(), end="")
    return 0


def run_systemd(_: argparse.Namespace) -> int:
    """Print a unit file that runs /opt/noria/bin/noria: noria config systemd > /etc/systemd/system/noria.service."""
    if (folder := shipped_folder("systemd", "deploy/systemd", _UNIT)) is None:
        raise ConfigError("this installation has no unit file; the wheel of noria-serve has it.")
    print((folder / _UNIT).read_text(encoding="utf-8"), end="")
    return 0
