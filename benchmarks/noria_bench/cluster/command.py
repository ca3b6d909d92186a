"""The command `noria bench cluster`. Heavy imports wait until it runs."""

import argparse
from typing import Any

from noria.cli.parser import Parser, add_plain_command, argument_type
from noria_bench.cluster import options
from noria_bench.cluster.options import ClusterOptions
from noria_bench.command_arguments import add_results_folder, replace_given, results_folder
from noria_bench.encoders import options as encoders_options


def add_to(benches: Any) -> Parser:
    """Add the command to argparse's subparsers; returns its parser."""
    parser = add_plain_command(benches, "cluster", _run, "on Ray beside the plain server, with a device that sleeps")
    default = ClusterOptions()
    parser.add_argument(
        "--engines",
        metavar="A,B",
        type=argument_type(options.read_engines),
        help=f"with short steps, in pairs of both servers ({','.join(map(str, default.engines))})",
    )
    parser.add_argument(
        "--scaling",
        metavar="A,B",
        type=argument_type(options.read_engines),
        help=f"engines with long steps ({','.join(map(str, default.scaling))})",
    )
    for name, value in (("--step-ms", default.step_ms), ("--long-step-ms", default.long_step_ms)):
        parser.add_argument(
            name,
            metavar="MS",
            type=argument_type(options.read_step_ms),
            help=f"milliseconds of a {'long' if 'long' in name else 'short'} step ({value:g})",
        )
    parser.add_argument(
        "--seconds", type=argument_type(encoders_options.read_seconds), help=f"of each load ({default.seconds:g})"
    )
    parser.add_argument(
        "--rounds",
        type=argument_type(encoders_options.read_rounds),
        help=f"in which both servers are measured in turn, with short steps ({default.num_rounds})",
    )
    parser.add_argument("--quick", action="store_true", help="1 and 2 engines, one short round: some two minutes")
    add_results_folder(parser, "cluster")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    """Measure what serving on Ray costs, and how both servers scale, with engines whose device sleeps."""
    from noria_bench.cluster import bench

    measured = replace_given(
        options.QUICK if arguments.quick else ClusterOptions(),
        engines=arguments.engines,
        scaling=arguments.scaling,
        step_ms=arguments.step_ms,
        long_step_ms=arguments.long_step_ms,
        seconds=arguments.seconds,
        num_rounds=arguments.rounds,
    )
    return bench.main(measured, results_folder(arguments.out, "cluster"))
