"""The commands `noria bench serve` and `install`. Heavy imports wait until one runs."""

import argparse
import functools
from typing import Any

from noria.cli.parser import Parser, add_command, add_plain_command, config_from
from noria_bench.command_arguments import add_diffusion_model
from noria_bench.option_values import ABOVE_0, number, whole
from noria_bench.targets.catalog import INSTALLABLE, TARGETS, TargetSettings

_TIMEOUT_MS = number(ABOVE_0, 3_600_000, "a timeout is more than 0 and at most 3600000 milliseconds")
_STREAM_MODES = ("bytesio", "chunks")


def add_serve(benches: Any) -> Parser:
    """Add `serve` to argparse's subparsers; returns its parser."""
    parser = add_command(benches, "serve", _serve, "TARGET [MODEL] [--port N]", "run one target, to be loaded by hand")
    parser.add_argument("target", metavar="TARGET", choices=tuple(TARGETS), help=", ".join(TARGETS))
    add_diffusion_model(parser)
    parser.add_argument(
        "--batch-timeout-ms", type=_TIMEOUT_MS, help="of a batch that is not full (the target's default)"
    )
    parser.add_argument(
        "--batch-size",
        type=whole(1, 1024, "a batch size is a whole number from 1 to 1024"),
        help="maximum images of a batch (the target's default)",
    )
    parser.add_argument("--stream", choices=_STREAM_MODES, help="how the streaming endpoints send the body (bytesio)")
    return parser


def add_install(benches: Any) -> Parser:
    """Add `install` to argparse's subparsers; returns its parser."""
    parser = add_plain_command(benches, "install", _install, "create the virtual environment of a framework")
    parser.add_argument("framework", metavar="FRAMEWORK", choices=INSTALLABLE, help=", ".join(INSTALLABLE))
    return parser


def _serve(arguments: argparse.Namespace) -> int:
    """Run one target on --port (8001) until Ctrl-C, to be loaded with ab or curl."""
    config = config_from(arguments)

    from noria_bench.targets import serve

    timeout_ms, defaults = arguments.batch_timeout_ms, TARGETS[arguments.target].settings
    settings = TargetSettings(
        timeout_s=defaults.timeout_s if timeout_ms is None else timeout_ms / 1000,
        max_images=arguments.batch_size or defaults.max_images,
        stream=arguments.stream or defaults.stream,
    )
    has_port = getattr(arguments, "frontend.port") is not None
    return serve.main(config, arguments.target, config.frontend.port if has_port else serve.DEFAULT_PORT, settings)


def _install(arguments: argparse.Namespace) -> int:
    """Create the virtual environment in which a framework's server runs."""
    from noria_bench.targets import environments

    environments.install(arguments.framework, functools.partial(print, flush=True))
    return 0
