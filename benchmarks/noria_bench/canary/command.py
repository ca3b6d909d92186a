"""The command `noria bench canary`. Heavy imports wait until it runs."""

import argparse
from typing import Any

from noria.cli.parser import Parser, add_plain_command
from noria_bench.command_arguments import add_results_folder, add_trace_seed, results_folder
from noria_bench.option_values import whole


def add_to(benches: Any) -> Parser:
    """Add the command to argparse's subparsers; returns its parser."""
    parser = add_plain_command(benches, "canary", _run, "good and bad canaries before the judge, in virtual time")
    parser.add_argument(
        "--runs",
        metavar="N",
        type=whole(4, 100_000, "runs are a whole number from 4 to 100000"),
        default=1000,
        help="A/A canaries; a quarter of other kinds (1000)",
    )
    add_results_folder(parser, "canary")
    add_trace_seed(parser)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    """Simulate canaries before the judge: how many good ones are rolled back, and how soon bad ones are."""
    from noria_bench.canary import bench

    return bench.main(arguments.runs, results_folder(arguments.out, "canary"), arguments.seed)
