"""The command `noria bench soak`. Heavy imports wait until it runs."""

import argparse
from typing import Any

from noria.cli.parser import Parser, add_plain_command, argument_type
from noria_bench.command_arguments import add_results_folder, results_folder


def add_to(benches: Any) -> Parser:
    """Add the command to argparse's subparsers; returns its parser."""
    parser = add_plain_command(benches, "soak", _run, "what grows in an hour of mixed traffic, attacks and kills")
    parser.add_argument("--minutes", metavar="M", type=argument_type(_minutes), default=60.0, help="(60)")
    add_results_folder(parser, "soak")
    return parser


def _minutes(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 10_080:
        raise ValueError(f"{text!r}; a soak takes more than 0 and at most 10080 minutes")
    return value


def _run(arguments: argparse.Namespace) -> int:
    """Serve the bundled model under mixed traffic, attacks and kills, and say whether memory, files, threads,
    connections and stored data stay flat.
    """
    from noria_bench.soak import bench

    return bench.main(60 * arguments.minutes, results_folder(arguments.out, "soak"))
