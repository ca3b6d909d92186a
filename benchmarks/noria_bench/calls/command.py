"""The command `noria bench calls`. Heavy imports wait until it runs."""

import argparse
import pathlib
from typing import Any

from noria.cli.parser import Parser, add_command, argument_type, config_from
from noria_bench.calls import options
from noria_bench.calls.options import CallsOptions
from noria_bench.command_arguments import add_diffusion_model, add_results_folder, replace_given, results_folder


def add_to(benches: Any) -> Parser:
    """Add the command to argparse's subparsers; returns its parser."""
    parser = add_command(
        benches,
        "calls",
        _run,
        "[MODEL] [--steps A,B] [--shares A,B] [--out FOLDER]",
        "how near images with skipped calls are to full ones",
    )
    add_diffusion_model(parser)
    default = CallsOptions()
    parser.add_argument(
        "--shares",
        metavar="A,B",
        type=argument_type(options.read_shares),
        help=f"of the calls that are made, 0.33 to 0.99 ({','.join(f'{share:g}' for share in default.shares)})",
    )
    parser.add_argument(
        "--steps", metavar="A,B", type=argument_type(options.read_steps), help="of the full images (the model's)"
    )
    parser.add_argument(
        "--schedulers",
        metavar="A,B",
        type=lambda text: tuple(text.split(",")),
        help="(the model's, or its first whose calls can be skipped)",
    )
    parser.add_argument(
        "--images",
        metavar="N",
        type=argument_type(options.read_images),
        help=f"with each setting, of as many prompts and seeds ({default.num_images})",
    )
    parser.add_argument("--prompts", metavar="FILE", type=pathlib.Path, help="of prompts, one a line (the bench's)")
    parser.add_argument("--seed", metavar="N", type=int, help=f"of the first image ({default.seed})")
    add_results_folder(parser)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    """Generate images with all calls of the model, with a share of them, and with as few steps, and compare both with
    the full ones.
    """
    config = config_from(arguments)

    from noria_bench.calls import bench

    measured = replace_given(
        CallsOptions(),
        shares=arguments.shares,
        steps=arguments.steps,
        schedulers=arguments.schedulers,
        num_images=arguments.images,
        prompts=arguments.prompts,
        seed=arguments.seed,
    )
    return bench.main(config, measured, results_folder(arguments.out, "calls"))
