"""What commands share: the argument parser, settings as flags, typed arguments."""

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from noria.config import Config
from noria.settings import Setting, allowed, list_settings, load, toml_value

T = TypeVar("T")


class Parser(argparse.ArgumentParser):
    """An ArgumentParser without abbreviations of flags, whose errors are one line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Print `message` and a hint to --help; exit with status 2."""
        sys.stderr.write(f"noria: error: {message} (try: {self.prog} --help)\n")
        raise SystemExit(2)

    @property
    def flags(self) -> list[str]:
        """All long flags."""
        return [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]


def add_command(commands: Any, name: str, run: Callable[[argparse.Namespace], int], usage: str, summary: str) -> Parser:
    """Add a command that takes settings; `usage` shows its other arguments. `run`'s docstring is its description."""
    parser = add_plain_command(commands, name, run, summary)
    parser.usage = f"{parser.prog} {usage} [--config FILE] [--SETTING VALUE ...]"
    return parser


def add_plain_command(commands: Any, name: str, run: Callable[[argparse.Namespace], int], summary: str) -> Parser:
    """Add a command that takes no settings. `run`'s docstring is its description."""
    parser: Parser = commands.add_parser(name, help=summary, description=run.__doc__)
    parser.set_defaults(run=run, parser=parser)
    return parser


def argument_type(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Wrap `parse` for argparse, so that the message of its ValueError reaches the user."""

    def parse_argument(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse_argument


def add_model_and_settings(parser: Parser) -> None:
    """Add the argument MODEL, a flag for each other setting, and --config."""
    parser.add_argument(
        "model",
        nargs="?",
        help="a folder in diffusers or transformers format, a hub id, bundled (the default) or minilm",
    )
    add_settings(parser, [setting for setting in list_settings() if setting.key != "model"])


def add_settings(parser: Parser, selected: list[Setting]) -> None:
    """Add a flag for each selected setting, and --config."""
    parser.add_argument("--config", metavar="FILE", help="TOML file of settings; variables and flags override it")
    group = parser.add_argument_group(
        "settings (docs/settings.md; each is also a key of the file and a NORIA_ variable)"
    )
    for setting in selected:
        text = f"{setting.description} ({toml_value(setting.default)})".replace("%", "%%")
        if "true" in allowed(setting).split(", "):
            group.add_argument(
                setting.flag, dest=setting.key, action=argparse.BooleanOptionalAction, default=None, help=text
            )
        else:
            metavar = allowed(setting).replace(", ", "|").replace(" ", "") or setting.path[-1].upper()
            group.add_argument(setting.flag, dest=setting.key, metavar=metavar, help=text)


def config_from(arguments: argparse.Namespace) -> Config:
    """The configuration from the file, the environment and the given flags."""
    flags = {setting.key: getattr(arguments, setting.key, None) for setting in list_settings()}
    return load(arguments.config, os.environ, {key: value for key, value in flags.items() if value is not None})
