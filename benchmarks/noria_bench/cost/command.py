"""The command `noria bench cost`. Heavy imports wait until it runs."""

import argparse
from typing import Any

from noria.cli.parser import Parser, add_command, argument_type, config_from
from noria_bench.command_arguments import add_diffusion_model, add_output, add_trace_seed
from noria_bench.cost import options
from noria_bench.cost.options import CostOptions


def add_to(benches: Any) -> Parser:
    """Add the command to argparse's subparsers; returns its parser."""
    summary = "the cost of metrics, logs and an open page /live"
    parser = add_command(benches, "cost", _run, "[MODEL] [-o FILE] [--features A,B]", summary)
    add_diffusion_model(parser)
    add_output(parser)
    add_trace_seed(parser)
    default = CostOptions()
    parser.add_argument(
        "--pairs",
        type=argument_type(options.read_pairs),
        default=default.num_pairs,
        help=f"number of pairs of runs, with and without ({default.num_pairs})",
    )
    parser.add_argument(
        "--requests",
        type=argument_type(options.read_requests),
        default=default.num_requests,
        help=f"number of requests in each run ({default.num_requests})",
    )
    parser.add_argument(
        "--users",
        type=argument_type(options.read_users),
        default=default.num_users,
        help=f"number of users in a closed loop ({default.num_users})",
    )
    parser.add_argument(
        "--features",
        metavar="A,B",
        type=argument_type(options.read_features),
        default=default.features,
        help=f"measured features, of {', '.join(options.FEATURES)} (all); others are off on both sides; "
        "none: two equal servers",
    )
    return parser


def _run(arguments: argparse.Namespace) -> int:
    """Measure what metrics, logs and an open page /live cost in throughput, and how long a scrape takes."""
    config = config_from(arguments)

    from noria_bench.cost import bench

    cost_options = CostOptions(
        num_pairs=arguments.pairs,
        num_requests=arguments.requests,
        num_users=arguments.users,
        features=arguments.features,
        seed=arguments.trace_seed,
    )
    return bench.main(config, cost_options, arguments.output)
