"""The command `noria bench cost`. Heavy imports wait until it runs."""

import argparse
from typing import Any

from noria.cli.parser import Parser, add_command, config_from
from noria_bench.command_arguments import add_diffusion_model, add_options, add_output, add_trace_seed, options_from
from noria_bench.cost.options import FEATURES, CostOptions
from noria_bench.option_values import USERS, names, whole


def add_to(benches: Any) -> Parser:
    """Add the command to argparse's subparsers; returns its parser."""
    summary = "the cost of metrics, logs and an open page /live"
    parser = add_command(benches, "cost", _run, "[MODEL] [-o FILE] [--features A,B]", summary)
    add_diffusion_model(parser)
    add_output(parser)
    add_trace_seed(parser)
    pairs = whole(1, 1000, "it is a whole number of pairs from 1 to 1000")
    requests = whole(1, 4096, "it is a whole number of requests from 1 to 4096")
    features = (
        f"measured features, of {', '.join(FEATURES)} (all); others are off on both sides; none: two equal servers"
    )
    add_options(
        parser,
        CostOptions(),
        ("--pairs", "num_pairs", pairs, "number of pairs of runs, with and without"),
        ("--requests", "num_requests", requests, "number of requests in each run"),
        ("--users", "num_users", USERS, "number of users in a closed loop"),
    )
    parser.add_argument("--features", metavar="A,B", type=_read_features, help=features)
    return parser


def _read_features(text: str) -> tuple[str, ...]:
    return () if text == "none" else names(FEATURES, "features besides none")(text)


def _run(arguments: argparse.Namespace) -> int:
    """Measure what metrics, logs and an open page /live cost in throughput, and how long a scrape takes."""
    config = config_from(arguments)

    from noria_bench.cost import bench

    return bench.main(config, options_from(arguments, CostOptions()), arguments.output)
