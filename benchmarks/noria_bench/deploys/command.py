"""The command `noria bench deploys`. Heavy imports wait until it runs."""

import argparse
from typing import Any

from noria.cli.parser import Parser, add_command, argument_type, config_from
from noria_bench.command_arguments import add_diffusion_model, add_results_folder, replace_given, results_folder
from noria_bench.cost import options as cost_options
from noria_bench.deploys import options
from noria_bench.deploys.options import DeploysOptions
from noria_bench.encoders import options as encoders_options


def add_to(benches: Any) -> Parser:
    """Add the command to argparse's subparsers; returns its parser."""
    parser = add_command(
        benches, "deploys", _run, "[MODEL] [--quick] [--out FOLDER]", "latencies while versions of models change"
    )
    add_diffusion_model(parser)
    default = DeploysOptions()
    parser.add_argument(
        "--niceness",
        metavar="A,B",
        type=argument_type(options.read_niceness),
        help=f"of loading, 0 to 19, each with servers of its own ({','.join(map(str, default.niceness))})",
    )
    parser.add_argument(
        "--image-users", type=argument_type(cost_options.read_users), help=f"of images ({default.image_users})"
    )
    parser.add_argument(
        "--text-users", type=argument_type(cost_options.read_users), help=f"of texts ({default.text_users})"
    )
    parser.add_argument(
        "--seconds",
        type=argument_type(encoders_options.read_seconds),
        help=f"before a deployment, and after it ({default.seconds:g})",
    )
    parser.add_argument(
        "--rounds",
        type=argument_type(encoders_options.read_rounds),
        help=f"in which all values of the niceness are measured in turn ({default.num_rounds})",
    )
    parser.add_argument("--trace-seed", type=int, help="of the images (1)")
    parser.add_argument("--quick", action="store_true", help="one short round of few users")
    add_results_folder(parser)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    """Measure latencies before, while and after versions of models are deployed, by the niceness of loading."""
    config = config_from(arguments)

    from noria_bench.deploys import bench

    measured = replace_given(
        options.QUICK if arguments.quick else DeploysOptions(),
        niceness=arguments.niceness,
        image_users=arguments.image_users,
        text_users=arguments.text_users,
        seconds=arguments.seconds,
        num_rounds=arguments.rounds,
        seed=arguments.trace_seed,
    )
    return bench.main(config, measured, results_folder(arguments.out, "deploys"))
