"""The command `noria bench deploys`. Heavy imports wait until it runs."""

import argparse
from typing import Any

from noria.cli.parser import Parser, add_command, config_from
from noria_bench.command_arguments import (
    add_diffusion_model,
    add_options,
    add_results_folder,
    add_trace_seed,
    options_from,
    results_folder,
)
from noria_bench.deploys import options
from noria_bench.deploys.options import DeploysOptions
from noria_bench.option_values import ROUNDS, SECONDS, USERS, wholes

_NICENESS = wholes(0, 19, "a niceness is a whole number from 0 to 19, such as 19,0")


def add_to(benches: Any) -> Parser:
    """Add the command to argparse's subparsers; returns its parser."""
    parser = add_command(
        benches, "deploys", _run, "[MODEL] [--quick] [--out FOLDER]", "latencies while versions of models change"
    )
    add_diffusion_model(parser)
    add_options(
        parser,
        DeploysOptions(),
        ("--niceness A,B", "niceness", _NICENESS, "of loading, 0 to 19, each with servers of its own"),
        ("--image-users", "image_users", USERS, "of images"),
        ("--text-users", "text_users", USERS, "of texts"),
        ("--seconds", "seconds", SECONDS, "before a deployment, and after it"),
        ("--rounds", "num_rounds", ROUNDS, "in which all values of the niceness are measured in turn"),
    )
    add_trace_seed(parser, "the images")
    parser.add_argument("--quick", action="store_true", help="one short round of few users")
    add_results_folder(parser)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    """Measure latencies before, while and after versions of models are deployed, by the niceness of loading."""
    config = config_from(arguments)

    from noria_bench.deploys import bench

    measured = options_from(arguments, options.QUICK if arguments.quick else DeploysOptions())
    return bench.main(config, measured, results_folder(arguments.out, "deploys"))
