"""Arguments that the commands of several benches take. Imports little: the command line reads it for every command."""

import argparse
import dataclasses
import datetime
import importlib
import pathlib
from collections.abc import Callable
from typing import Any, TypeVar

from noria.cli.parser import Parser, add_command, add_plain_command, add_settings, config_from

OptionsT = TypeVar("OptionsT")


def add_diffusion_model(parser: Parser) -> None:
    """Add the argument MODEL and a flag for each other setting."""
    parser.add_argument("model", nargs="?", help="a folder in diffusers format, a hub id, or bundled (the default)")
    add_settings(parser)


def add_output(parser: Parser) -> None:
    """Add `-o FILE`, for results in one file."""
    parser.add_argument("-o", "--output", metavar="FILE", type=pathlib.Path, help="JSON file for the results")


def add_results_folder(parser: Parser, bench: str = "BENCH") -> None:
    """Add `--out FOLDER`, for results in several files."""
    parser.add_argument(
        "--out", metavar="FOLDER", type=pathlib.Path, help=f"for the results (bench-results/DATE-TIME-{bench})"
    )


def add_trace_seed(parser: Parser, of: str = "the requests") -> None:
    """Add `--trace-seed N`, the option `seed`."""
    parser.add_argument("--trace-seed", dest="seed", type=int, default=1, help=f"of {of} (1)")


def add_options(parser: Parser, defaults: Any, *options: tuple[str, str, Any, str]) -> None:
    """Add options that set fields of `defaults`, a dataclass: flag and metavar, field, type, help without the default.

    A help that ends with a parenthesis says the default itself.
    """
    for flag, field, kind, text in options:
        name, _, metavar = flag.partition(" ")
        value = getattr(defaults, field)
        shown = ",".join(f"{each:g}" if isinstance(each, float) else str(each) for each in _as_tuple(value))
        words = text if text.endswith(")") else f"{text} ({shown})"
        parser.add_argument(name, dest=field, metavar=metavar or name[2:].upper(), type=kind, help=words)


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def results_folder(given: pathlib.Path | None, bench: str) -> pathlib.Path:
    """The folder that `--out` names; else a new one, which is not created."""
    return given or pathlib.Path("bench-results") / f"{datetime.datetime.now():%Y%m%d-%H%M%S}-{bench}"


def options_from(arguments: argparse.Namespace, defaults: OptionsT) -> OptionsT:
    """Return `defaults`, a dataclass, with each of its fields that the arguments have and that is not None."""
    given = {field.name: getattr(arguments, field.name, None) for field in dataclasses.fields(defaults)}  # type: ignore[arg-type]
    return dataclasses.replace(defaults, **{name: value for name, value in given.items() if value is not None})  # type: ignore[type-var]


@dataclasses.dataclass(frozen=True)
class BenchCommand:
    """The command `noria bench NAME`: what it says of itself, and its options.

    It calls `main` of its module with the settings and the options, if it takes any, and where results go.
    """

    name: str
    summary: str
    description: str
    defaults: Any = None  # its options, a dataclass; None: it takes none
    options: tuple[tuple[str, str, Any, str], ...] = ()  # as `add_options` takes them
    usage: str = ""  # its arguments besides settings; empty: it takes no settings
    add_more: Callable[[Parser], None] = lambda _: None  # adds the arguments that no other bench has
    add_model: Callable[[Parser], None] = add_diffusion_model
    seed_of: str = ""  # that --trace-seed is of; empty: there is none
    quick: Any = None  # options of --quick; None: there is none
    quick_help: str = ""
    has_folder: bool = True  # for results; False: one file
    module: str = ""  # with `main`; empty: `noria_bench.NAME.bench`

    def add_to(self, benches: Any) -> Parser:
        """Add the command to argparse's subparsers; returns its parser."""

        def run(arguments: argparse.Namespace) -> int:
            return self._run(arguments)

        run.__doc__ = self.description
        if self.usage:
            parser = add_command(benches, self.name, run, self.usage, self.summary)
            self.add_model(parser)
        else:
            parser = add_plain_command(benches, self.name, run, self.summary)
        add_options(parser, self.defaults, *self.options)
        self.add_more(parser)
        if self.seed_of:
            add_trace_seed(parser, self.seed_of)
        if self.quick is not None:
            parser.add_argument("--quick", action="store_true", help=self.quick_help)
        if self.has_folder:
            add_results_folder(parser, self.name)
        else:
            add_output(parser)
        return parser

    def _run(self, arguments: argparse.Namespace) -> int:
        given: list[Any] = [config_from(arguments)] if self.usage else []
        if self.defaults is not None:
            given.append(options_from(arguments, self.quick if getattr(arguments, "quick", False) else self.defaults))
        given.append(results_folder(arguments.out, self.name) if self.has_folder else arguments.output)
        bench = importlib.import_module(self.module or f"noria_bench.{self.name}.bench")
        status: int = bench.main(*given)
        return status
