"""The command `noria bench sharing`. Heavy imports wait until it runs."""

import argparse
from typing import Any

from noria.cli.parser import Parser, add_command, argument_type, config_from
from noria_bench.command_arguments import add_diffusion_model, add_results_folder, replace_given, results_folder
from noria_bench.cost import options as cost_options
from noria_bench.encoders import options as encoders_options
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
    default = SharingOptions()
    parser.add_argument(
        "--connections",
        metavar="A,B",
        type=argument_type(encoders_options.read_connections),
        help=f"of the closed loops of texts, 1 to 128 ({','.join(map(str, default.connections))})",
    )
    parser.add_argument(
        "--rate",
        type=argument_type(options.read_rate),
        help=f"of the open loop of texts, requests per second ({default.rate:g})",
    )
    parser.add_argument(
        "--users",
        type=argument_type(cost_options.read_users),
        help=f"of images, in a closed loop ({default.num_users})",
    )
    parser.add_argument(
        "--seconds",
        type=argument_type(encoders_options.read_seconds),
        help=f"of each load, twice as long of the open loop ({default.seconds:g})",
    )
    parser.add_argument(
        "--rounds",
        type=argument_type(encoders_options.read_rounds),
        help=f"in which all divisions of the cores are measured in turn ({default.num_rounds})",
    )
    parser.add_argument("--trace-seed", type=int, help="of the images and arrivals (1)")
    parser.add_argument("--quick", action="store_true", help="one short round, in some two minutes")
    add_results_folder(parser)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    """Measure what embeddings and images from one server cost each other, by how the cores are divided."""
    config = config_from(arguments)

    from noria_bench.sharing import bench

    measured = replace_given(
        options.QUICK if arguments.quick else SharingOptions(),
        connections=arguments.connections,
        rate=arguments.rate,
        num_users=arguments.users,
        seconds=arguments.seconds,
        num_rounds=arguments.rounds,
        seed=arguments.trace_seed,
    )
    return bench.main(config, measured, results_folder(arguments.out, "sharing"))
