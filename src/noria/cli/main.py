"""The command line `noria`: builds the parser, runs one command, turns errors into an exit status.

Only the module of the command that is given is imported, and that imports what it needs when it runs: `noria --help`
must answer at once, and a health check runs every few seconds.
"""

import argparse
import contextlib
import errno
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from noria import __version__
from noria.cli.parser import Parser
from noria.errors import NoriaError, RequestError, SetupError, short_repr
from noria.protocol.process_signals import end_by_signals_as_init

_MODULES = {
    "serve": "serve", "health": "health", "top": "top.command", "generate": "generate", "embed": "embed",
    "show": "show", "models": "registry.models", "deploy": "registry.deployments", "promote": "registry.deployments",
    "rollback": "registry.deployments", "undeploy": "registry.deployments", "status": "registry.deployments",
    "stats": "registry.stats", "trace": "registry.trace", "registry": "registry.maintenance",
    "doctor": "doctor.command", "config": "config", "key": "key", "dashboards": "dashboards", "docs": "docs",
}  # fmt: skip
"""The modules of `noria.cli` by command, in the order of the help; all others are of plugins."""

_OUTPUT_ERRORS = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Numbers of errors that `print` raises; others, and those that name a file, are no fault of standard output."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0, 1 failed, 2 settings or arguments, 3 model, 130 interrupted.

    It is 141, as if by SIGPIPE, if the reader of standard output has left.
    """
    if argv is None:
        _use_utf8()
        end_by_signals_as_init()
    try:
        try:
            return run(_parse(sys.argv[1:] if argv is None else list(argv)))
        finally:
            if sys.stdout is not None:  # it is None if the descriptor was closed
                sys.stdout.flush()  # here, where its error can be handled, also after --help
    except OSError as error:
        if error.errno not in _OUTPUT_ERRORS or error.filename is not None:
            raise
        with contextlib.suppress(OSError):  # the rest is lost, and its flush at exit must not fail
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if error.errno == errno.EPIPE:
            return 128 + signal.SIGPIPE
        _print_error(f"the output cannot be written: {error.strerror}.")
        return 1


def _use_utf8() -> None:
    """Start again in UTF-8 mode if the locale and PYTHONUTF8=0 make Python read names and text as ASCII."""
    if sys.getfilesystemencoding() != "utf-8" and os.environ.get("PYTHONUTF8") != "1":
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - itself


def run(arguments: argparse.Namespace) -> int:
    """Run the command that was parsed; prints its error, if any, and returns the exit status."""
    try:
        status: int = arguments.run(arguments)
    except NoriaError as error:
        _print_error(error.message)
        if isinstance(error, SetupError):
            return error.exit_status
        return 2 if isinstance(error, RequestError) else 1
    except KeyboardInterrupt:
        return 130
    return status


def _print_error(message: str) -> None:
    with contextlib.suppress(OSError):  # standard error is closed, too
        print(f"noria: error: {message}", file=sys.stderr)


def build_parser(command: str | None = None) -> tuple[Parser, dict[str, Parser]]:
    """The parser of the whole command line, or of `command` alone if it is ours, and those of commands by name."""
    parser = Parser(
        prog="noria",
        description="A server for image models and text encoders with continuous batching.",
        epilog="First steps: noria serve, then open the address that it prints; noria docs install. Documents that "
        "messages name as docs/NAME.md: noria docs NAME.",
    )
    parser.add_argument("-V", "--version", action="version", version=f"noria {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    names = [_MODULES[command]] if command in _MODULES else [*dict.fromkeys(_MODULES.values()), "plugins"]
    modules = [importlib.import_module(f"noria.cli.{name}") for name in names]
    parsers: list[Parser] = [each for module in modules for each in module.add_to(commands)]
    return parser, {each.prog.removeprefix("noria "): each for each in parsers}


def _parse(argv: list[str]) -> argparse.Namespace:
    parser, _ = build_parser(argv[0] if argv else None)
    if argv[:1] == ["help"]:
        argv = [*argv[1:], "--help"]
    for text in argv:
        # Python's surrogates for bytes that it cannot decode
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            parser.error(f"the argument {short_repr(text)} is not UTF-8")
    arguments, unknown = parser.parse_known_args(argv)
    if unknown and not getattr(arguments, "ignores_unknown_arguments", False):
        flag = unknown[0].partition("=")[0]
        arguments.parser.error(f"unknown argument {short_repr(unknown[0])}.{arguments.parser.suggest_flag(flag)}")
    return arguments
