"""The command `noria bench cluster`. Heavy imports wait until it runs."""

import argparse
from typing import Any

from noria.cli.parser import Parser, add_plain_command
from noria_bench.cluster import options
from noria_bench.cluster.options import ClusterOptions
from noria_bench.command_arguments import add_options, add_results_folder, options_from, results_folder
from noria_bench.option_values import ROUNDS, SECONDS, number, ordered, wholes


def add_to(benches: Any) -> Parser:
    """Add the command to argparse's subparsers; returns its parser."""
    parser = add_plain_command(benches, "cluster", _run, "on Ray beside the plain server, with a device that sleeps")
    engines = ordered(wholes(1, 64, "numbers of engines are whole numbers from 1 to 64, such as 1,2,4"))
    step_ms = number(1, 10_000, "a step takes 1 to 10000 milliseconds")
    add_options(
        parser,
        ClusterOptions(),
        ("--engines A,B", "engines", engines, "with short steps, in pairs of both servers"),
        ("--scaling A,B", "scaling", engines, "engines with long steps"),
        ("--step-ms MS", "step_ms", step_ms, "milliseconds of a short step"),
        ("--long-step-ms MS", "long_step_ms", step_ms, "milliseconds of a long step"),
        ("--seconds", "seconds", SECONDS, "of each load"),
        ("--rounds", "num_rounds", ROUNDS, "in which both servers are measured in turn, with short steps"),
    )
    parser.add_argument("--quick", action="store_true", help="1 and 2 engines, one short round: some two minutes")
    add_results_folder(parser, "cluster")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    """Measure what serving on Ray costs, and how both servers scale, with engines whose device sleeps."""
    from noria_bench.cluster import bench

    measured = options_from(arguments, options.QUICK if arguments.quick else ClusterOptions())
    return bench.main(measured, results_folder(arguments.out, "cluster"))
