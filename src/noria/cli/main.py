"""The command line `noria`: builds the parser, runs one command, turns errors into an exit status.

Commands import what they need when they run, nothing heavy at import time: `noria --help` must answer at once.
"""

import argparse
import sys
from collections.abc import Sequence

from noria import __version__
from noria.cli import dashboards, embed, generate, key, plugins, serve, show
from noria.cli.doctor import command as doctor
from noria.cli.parser import Parser
from noria.cli.registry import deployments, maintenance, models, statistics, trace
from noria.cli.top import command as top
from noria.errors import NoriaError, RequestError, SetupError, did_you_mean, short_repr


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0, 1 failed, 2 settings or arguments, 3 model, 130 interrupted."""
    return run(_parse(sys.argv[1:] if argv is None else list(argv)))


def run(arguments: argparse.Namespace) -> int:
    """Run the command that was parsed; prints its error, if any, and returns the exit status."""
    try:
        status: int = arguments.run(arguments)
    except NoriaError as error:
        print(f"noria: error: {error.message}", file=sys.stderr)
        if isinstance(error, SetupError):
            return error.exit_status
        return 2 if isinstance(error, RequestError) else 1
    except KeyboardInterrupt:
        return 130
    return status


def build_parser() -> tuple[Parser, dict[str, Parser]]:
    """The parser of the whole command line, and the parsers of all commands by name."""
    parser = Parser(prog="noria", description="A server for diffusion models with continuous batching.")
    parser.add_argument("--version", action="version", version=f"noria {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    modules = (
        serve, top, generate, embed, show, models, deployments, statistics, trace, maintenance, doctor, key, dashboards,
        plugins,
    )  # fmt: skip
    parsers = [command for module in modules for command in module.add_to(commands)]
    return parser, {command.prog.removeprefix("noria "): command for command in parsers}


def _parse(argv: list[str]) -> argparse.Namespace:
    parser, _ = build_parser()
    for text in argv:
        # Python's surrogates for bytes that it cannot decode
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            parser.error(f"the argument {short_repr(text)} is not UTF-8")
    arguments, unknown = parser.parse_known_args(argv)
    if unknown and not getattr(arguments, "ignores_unknown_arguments", False):
        flag = unknown[0].partition("=")[0]
        arguments.parser.error(
            f"unknown argument {short_repr(unknown[0])}.{did_you_mean(flag, arguments.parser.flags)}"
        )
    return arguments
