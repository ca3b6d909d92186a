"""Arguments that the commands of several benches take. Imports little: the command line reads it for every command."""

import dataclasses
import datetime
import pathlib
from typing import Any, TypeVar

from noria.cli.parser import Parser, add_settings
from noria.settings import list_settings

OptionsT = TypeVar("OptionsT")


def add_diffusion_model(parser: Parser) -> None:
    """Add the argument MODEL and a flag for each other setting."""
    parser.add_argument("model", nargs="?", help="a folder in diffusers format, a hub id, or bundled (the default)")
    add_settings(parser, [setting for setting in list_settings() if setting.key != "model"])


def add_output(parser: Parser) -> None:
    """Add `-o FILE`, for results in one file."""
    parser.add_argument("-o", "--output", metavar="FILE", type=pathlib.Path, help="JSON file for the results")


def add_results_folder(parser: Parser, bench: str = "BENCH") -> None:
    """Add `--out FOLDER`, for results in several files."""
    parser.add_argument(
        "--out", metavar="FOLDER", type=pathlib.Path, help=f"for the results (bench-results/DATE-TIME-{bench})"
    )


def add_trace_seed(parser: Parser) -> None:
    """Add `--trace-seed N`."""
    parser.add_argument("--trace-seed", type=int, default=1, help="of the requests (1)")


def results_folder(given: pathlib.Path | None, bench: str) -> pathlib.Path:
    """The folder that `--out` names; else a new one, which is not created."""
    return given or pathlib.Path("bench-results") / f"{datetime.datetime.now():%Y%m%d-%H%M%S}-{bench}"


def replace_given(defaults: OptionsT, **given: Any) -> OptionsT:
    """Return `defaults`, a dataclass, with those of the given values that are not None."""
    return dataclasses.replace(defaults, **{name: value for name, value in given.items() if value is not None})  # type: ignore[type-var]
