"""What every command of the command line is made with: the parser, settings as flags, checked values."""

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from noria.config import Config
from noria.settings import Setting, allowed, list_settings, load, toml_value

T = TypeVar("T")


class Parser(argparse.ArgumentParser):
    """An ArgumentParser whose complaint about an unknown flag names the nearest one; abbreviations are not taken."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Print `message` and how to get help; exit with status 2."""
        sys.stderr.write(f"noria: error: {message} (try: {self.prog} --help)\n")
        raise SystemExit(2)

    @property
    def flags(self) -> list[str]:
        """Every long flag."""
        return [flag for action in self._actions for flag in action.option_strings if flag.startswith("--")]


def add_command(commands: Any, name: str, run: Callable[[argparse.Namespace], int], usage: str, summary: str) -> Parser:
    """One command: `run` does it and its docstring describes it."""
    parser: Parser = commands.add_parser(name, help=summary, description=run.__doc__)
    parser.usage = f"{parser.prog} {usage} [--config FILE] [--SETTING VALUE ...]"
    parser.set_defaults(run=run, parser=parser)
    return parser


def argument_type(parse: Callable[[str], T]) -> Callable[[str], T]:
    """`read` as argparse wants it: its ValueError's words reach the user."""

    def parse_argument(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return parse_argument


def add_settings(parser: Parser, selected: list[Setting]) -> None:
    """One flag for each setting, as `config.py` declares it, and --config."""
    parser.add_argument("--config", metavar="FILE", help="TOML file of settings; environment and flags win over it")
    group = parser.add_argument_group(
        "settings (docs/settings.md; each is also a key of the file and a NORIA_ variable)"
    )
    for setting in selected:
        text = f"{setting.description} ({toml_value(setting.default)})".replace("%", "%%")
        if isinstance(setting.default, bool):
            group.add_argument(
                setting.flag, dest=setting.key, action=argparse.BooleanOptionalAction, default=None, help=text
            )
        else:
            metavar = allowed(setting).replace(", ", "|").replace(" ", "") or setting.path[-1].upper()
            group.add_argument(setting.flag, dest=setting.key, metavar=metavar, help=text)


def config_from(arguments: argparse.Namespace) -> Config:
    """File, environment and the flags that were given, merged."""
    flags = {setting.key: getattr(arguments, setting.key, None) for setting in list_settings()}
    return load(arguments.config, os.environ, {key: value for key, value in flags.items() if value is not None})
