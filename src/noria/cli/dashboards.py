"""`noria dashboards build`: writes the Grafana dashboards."""

import argparse
import pathlib
from typing import Any

from noria.cli.parser import Parser, add_plain_command

_FOLDER = pathlib.Path("deploy/grafana/dashboards")


def add_to(commands: Any) -> list[Parser]:
    """Add the command; returns its parser."""
    dashboards = commands.add_parser("dashboards", help="write the Grafana dashboards")
    subcommands = dashboards.add_subparsers(metavar="COMMAND", required=True)
    parser = add_plain_command(subcommands, "build", run, "as JSON files")
    parser.add_argument(
        "--out", metavar="FOLDER", type=pathlib.Path, default=_FOLDER, help=f"for the files ({_FOLDER})"
    )
    return [parser]


def run(arguments: argparse.Namespace) -> int:
    """Write the Grafana dashboards as JSON files. Fails if a panel queries a metric that Noria does not export."""
    from noria.dashboards.build import build

    build(arguments.out, print)
    return 0
