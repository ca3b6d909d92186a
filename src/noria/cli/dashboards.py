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
    parser.add_argument(
        "--rules", metavar="FOLDER", type=pathlib.Path, help="also for Prometheus' rules: alerts, and what panels query"
    )
    parser.add_argument(
        "--docs",
        metavar="URL",
        default="",
        help="with --rules: a server, such as http://noria.example:8000, whose /docs the alerts' runbook_url names",
    )
    return [parser]


def run(arguments: argparse.Namespace) -> int:
    """Write the Grafana dashboards as JSON files. Fails if a panel queries a metric that Noria does not export."""
    from noria.dashboards.build import build, write_rules

    build(arguments.out, print)
    if arguments.rules is not None:
        write_rules(arguments.rules, print, arguments.docs)
    return 0
