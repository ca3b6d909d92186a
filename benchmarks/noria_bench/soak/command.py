"""The commands `noria bench soak` and `noria bench neighbours`. Heavy imports wait until it runs."""

import argparse
from typing import Any

from noria.cli.parser import Parser, add_command, add_plain_command, config_from
from noria_bench.command_arguments import (
    add_diffusion_model,
    add_options,
    add_results_folder,
    options_from,
    results_folder,
)
from noria_bench.option_values import ABOVE_0, SECONDS, names, number
from noria_bench.soak.heap_options import HEAP_NAMES, HEAP_TARGETS, HeapOptions

_MINUTES = number(ABOVE_0, 10_080, "a soak takes more than 0 and at most 10080 minutes")


def add_to(benches: Any) -> Parser:
    """Add the command to argparse's subparsers; returns its parser."""
    parser = add_plain_command(benches, "soak", _run, "what grows in an hour of mixed traffic, attacks and kills")
    parser.add_argument("--minutes", metavar="M", type=_MINUTES, default=60.0, help="(60)")
    add_results_folder(parser, "soak")
    return parser


def add_neighbours(benches: Any) -> Parser:
    """Add `neighbours` to argparse's subparsers; returns its parser."""
    parser = add_command(
        benches,
        "neighbours",
        _run_neighbours,
        "[MODEL] [--part attacks|heaps]",
        "how long quiet clients wait while others attack the server, or send it heaps",
    )
    add_diffusion_model(parser)
    parser.add_argument("--part", choices=("attacks", "heaps"), default="attacks", help="(attacks)")
    add_options(
        parser,
        HeapOptions(),
        ("--heaps A,B", "heaps", names(HEAP_NAMES, "heaps"), f"of {', '.join(HEAP_NAMES)} (all)"),
        ("--targets A,B", "targets", names(HEAP_TARGETS, "targets"), f"of heaps: {', '.join(HEAP_TARGETS)}"),
        ("--seconds", "seconds", SECONDS, "of each measurement of heaps, three times as long beside them"),
    )
    add_results_folder(parser)
    return parser


def _run_neighbours(arguments: argparse.Namespace) -> int:
    """Run attacks beside a quiet client of the bundled model and an encoder, or heaps of one client beside small
    requests of seven others, and say how much longer these wait.
    """
    folder = results_folder(arguments.out, "neighbours")
    if arguments.part == "attacks":
        from noria_bench.soak import neighbours

        return neighbours.main(folder)
    from noria_bench.soak import heaps

    return heaps.main(config_from(arguments), options_from(arguments, HeapOptions()), folder)


def _run(arguments: argparse.Namespace) -> int:
    """Serve the bundled model under mixed traffic, attacks and kills, and say whether memory, files, threads,
    connections and stored data stay flat.
    """
    from noria_bench.soak import bench

    return bench.main(60 * arguments.minutes, results_folder(arguments.out, "soak"))
