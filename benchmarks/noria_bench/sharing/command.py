"""The command `noria bench sharing`. Heavy imports wait until it runs."""

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
from noria_bench.option_values import CONNECTIONS, ROUNDS, SECONDS, USERS, number
from noria_bench.sharing import options
from noria_bench.sharing.options import SharingOptions


def add_to(benches: Any) -> Parser:
    """Add the command to argparse's subparsers; returns its parser."""
    parser = add_command(
        benches,
        "sharing",
        _run,
        "[MODEL] [--quick] [--out FOLDER]",
        "what embeddings and images from one server cost each other",
    )
    add_diffusion_model(parser)
    rate = number(1, 1000, "a rate is 1 to 1000 requests per second")
    add_options(
        parser,
        SharingOptions(),
        ("--connections A,B", "connections", CONNECTIONS, "of the closed loops of texts, 1 to 128"),
        ("--rate", "rate", rate, "of the open loop of texts, requests per second"),
        ("--users", "num_users", USERS, "of images, in a closed loop"),
        ("--seconds", "seconds", SECONDS, "of each load, twice as long of the open loop"),
        ("--rounds", "num_rounds", ROUNDS, "in which all divisions of the cores are measured in turn"),
    )
    add_trace_seed(parser, "the images and arrivals")
    parser.add_argument("--quick", action="store_true", help="one short round, in some two minutes")
    add_results_folder(parser)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    """Measure what embeddings and images from one server cost each other, by how the cores are divided."""
    config = config_from(arguments)

    from noria_bench.sharing import bench

    measured = options_from(arguments, options.QUICK if arguments.quick else SharingOptions())
    return bench.main(config, measured, results_folder(arguments.out, "sharing"))
