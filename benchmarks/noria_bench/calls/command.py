"""The command `noria bench calls`. Heavy imports wait until it runs."""

import argparse
import pathlib
from typing import Any

from noria.cli.parser import Parser, add_command, config_from
from noria.protocol.diffusion import MIN_CALLS
from noria_bench.calls.options import CallsOptions
from noria_bench.command_arguments import (
    add_diffusion_model,
    add_options,
    add_results_folder,
    options_from,
    results_folder,
)
from noria_bench.option_values import number, whole, wholes

_SHARE = number(MIN_CALLS, 0.99, f"shares are numbers from {MIN_CALLS} to 0.99, such as 0.5,0.33")


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
    images = whole(1, 10_000, "it is a whole number of images from 1 to 10000")
    steps = wholes(1, 1000, "steps are whole numbers up to 1000, such as 50,20")
    add_options(
        parser,
        CallsOptions(),
        ("--shares A,B", "shares", _read_shares, "of the calls that are made, 0.33 to 0.99"),
        ("--steps A,B", "steps", steps, "of the full images (the model's)"),
        ("--schedulers A,B", "schedulers", _read_names, "(the model's, or its first whose calls can be skipped)"),
        ("--images N", "num_images", images, "with each setting, of as many prompts and seeds"),
        ("--seed N", "seed", int, "of the first image"),
    )
    parser.add_argument("--prompts", metavar="FILE", type=pathlib.Path, help="of prompts, one a line (the bench's)")
    add_results_folder(parser)
    return parser


def _read_shares(text: str) -> tuple[float, ...]:
    return tuple(sorted(set(map(_SHARE, text.split(","))), reverse=True))


def _read_names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _run(arguments: argparse.Namespace) -> int:
    """Generate images with all calls of the model, with a share of them, and with as few steps, and compare both with
    the full ones.
    """
    config = config_from(arguments)

    from noria_bench.calls import bench

    return bench.main(config, options_from(arguments, CallsOptions()), results_folder(arguments.out, "calls"))
