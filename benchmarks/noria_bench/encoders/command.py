"""The command `noria bench encoders`. Heavy imports wait until it runs."""

import argparse
from typing import Any

import msgspec

from noria.cli.parser import Parser, add_command, add_settings, config_from
from noria_bench.command_arguments import (
    add_options,
    add_results_folder,
    add_trace_seed,
    options_from,
    results_folder,
)
from noria_bench.encoders.options import CORPORA, QUICK, TARGETS, EncodersOptions
from noria_bench.option_values import CONNECTIONS, ROUNDS, SECONDS, names, ordered, wholes

_OPEN_LOOPS = ordered(wholes(1, 100, "open loops are none, or percents of the raw loop's rate, such as 30,60,85"))


def add_to(benches: Any) -> Parser:
    """Add the command to argparse's subparsers; returns its parser."""
    parser = add_command(
        benches,
        "encoders",
        _run,
        "[MODEL] [--targets A,B|all] [--quick] [--out FOLDER]",
        "text encoders: Noria beside Triton, LitServe, BentoML, FastAPI and Infinity",
    )
    parser.add_argument(
        "model",
        nargs="?",
        default="minilm",
        help="a folder in transformers format, a hub id, minilm (the default), or free: a model that costs nothing, "
        "so that only the way of a request is measured",
    )
    add_settings(parser)
    add_results_folder(parser, "encoders")
    targets = f"of {', '.join(TARGETS)} (all but noria-8, triton-n, triton-n-batching and infinity)"
    corpora = "fixed: one sentence; mixed: 4 to 256 tokens; all (the default)"
    add_options(
        parser,
        EncodersOptions(),
        ("--targets A,B|all", "targets", names(TARGETS, "targets"), targets),
        ("--connections A,B", "connections", CONNECTIONS, "of the closed loops, 1 to 128"),
        ("--seconds", "seconds", SECONDS, "of each load"),
        ("--corpus", "corpora", names(CORPORA, "corpora"), corpora),
        ("--open-loops A,B|none", "load_percents", _read_open_loops, "percents of the raw loop's rate"),
        ("--rounds", "num_rounds", ROUNDS, "in which all targets are measured in turn"),
    )
    parser.add_argument(
        "--no-sweeps",
        dest="sweeps",
        action="store_const",
        const=False,
        help="use each target's first settings instead of looking for the best",
    )
    add_trace_seed(parser, "the texts and arrivals")
    parser.add_argument("--quick", action="store_true", help="one short round without sweeps, in some three minutes")
    return parser


def _read_open_loops(text: str) -> tuple[int, ...]:
    return () if text == "none" else _OPEN_LOOPS(text)


def _run(arguments: argparse.Namespace) -> int:
    """Measure text encoders: Noria beside other servers, on a CPU in about twenty minutes; --devices names a GPU."""
    config = config_from(arguments)

    from noria_bench.encoders import bench
    from noria_bench.encoders.random_folder import free_model

    if config.model == "free":
        config = msgspec.structs.replace(config, model=str(free_model(config.engine.cache_dir)))
    measured = options_from(arguments, QUICK if arguments.quick else EncodersOptions())
    return bench.main(config, measured, results_folder(arguments.out, "encoders"))
