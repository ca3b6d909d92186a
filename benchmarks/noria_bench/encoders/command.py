"""The command `noria bench encoders`. Heavy imports wait until it runs."""

import argparse
from typing import Any

import msgspec

from noria.cli.parser import Parser, add_command, add_settings, argument_type, config_from
from noria.settings import list_settings
from noria_bench.command_arguments import add_results_folder, replace_given, results_folder
from noria_bench.encoders import options
from noria_bench.encoders.options import EncodersOptions


def add_to(benches: Any) -> Parser:
    """Add the command to argparse's subparsers; returns its parser."""
    parser = add_command(
        benches,
        "encoders",
        _run,
        "[MODEL] [--targets A,B|all] [--quick] [--out FOLDER]",
        "text encoders: Noria beside Triton, LitServe, BentoML, FastAPI and Infinity",
    )
    default = EncodersOptions()
    parser.add_argument(
        "model",
        nargs="?",
        default="minilm",
        help="a folder in transformers format, a hub id, minilm (the default), or free: a model that costs nothing, "
        "so that only the way of a request is measured",
    )
    add_settings(parser, [setting for setting in list_settings() if setting.key != "model"])
    add_results_folder(parser, "encoders")
    parser.add_argument(
        "--targets",
        metavar="A,B|all",
        type=argument_type(options.read_targets),
        help=f"of {', '.join(options.TARGETS)} (all but noria-8, triton-n, triton-n-batching and infinity)",
    )
    parser.add_argument(
        "--connections",
        metavar="A,B",
        type=argument_type(options.read_connections),
        help=f"of the closed loops, 1 to 128 ({','.join(map(str, default.connections))})",
    )
    parser.add_argument(
        "--seconds", type=argument_type(options.read_seconds), help=f"of each load ({default.seconds:g})"
    )
    parser.add_argument(
        "--corpus",
        type=argument_type(options.read_corpora),
        help="fixed: one sentence; mixed: 4 to 256 tokens; all (the default)",
    )
    parser.add_argument(
        "--open-loops",
        metavar="A,B|none",
        type=argument_type(options.read_open_loops),
        help=f"percents of the raw loop's rate ({','.join(map(str, default.load_percents))})",
    )
    parser.add_argument(
        "--no-sweeps", action="store_true", help="use each target's first settings instead of looking for the best"
    )
    parser.add_argument(
        "--rounds",
        type=argument_type(options.read_rounds),
        help=f"in which all targets are measured in turn ({default.num_rounds})",
    )
    parser.add_argument("--trace-seed", type=int, help="of the texts and arrivals (1)")
    parser.add_argument("--quick", action="store_true", help="one short round without sweeps, in some three minutes")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    """Measure text encoders: Noria beside other servers, on a CPU in about twenty minutes; --devices names a GPU."""
    config = config_from(arguments)

    from noria_bench.encoders import bench
    from noria_bench.encoders.random_folder import free_model

    if config.model == "free":
        config = msgspec.structs.replace(config, model=str(free_model(config.engine.cache_dir)))
    measured = replace_given(
        options.QUICK if arguments.quick else EncodersOptions(),
        targets=arguments.targets,
        connections=arguments.connections,
        seconds=arguments.seconds,
        corpora=arguments.corpus,
        load_percents=arguments.open_loops,
        sweeps=False if arguments.no_sweeps else None,
        num_rounds=arguments.rounds,
        seed=arguments.trace_seed,
    )
    return bench.main(config, measured, results_folder(arguments.out, "encoders"))
