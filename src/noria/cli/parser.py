"""The parts that commands share: the argument parser, settings as flags, typed arguments."""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn, TypeVar

from noria.config import Config
from noria.errors import did_you_mean, short_repr
from noria.settings import OTHER_NAMES, Setting, allowed, list_settings, load, toml_value

T = TypeVar("T")

_FIRST = (
    "frontend.host", "frontend.port", "frontend.api_keys_file", "frontend.allowed_hosts", "engine.devices",
    "engine.slots", "additional_models", "data_dir", "log_level",
)  # fmt: skip
"""The settings that most people need, which help shows first."""
_FIRST_TITLE = "settings that most people need (each is also a key of the file and a NORIA_ variable)"

_OTHER_COMMANDS = {
    "version": "--version", "run": "serve", "start": "serve", "up": "serve", "server": "serve", "ps": "status",
    "model": "models", "ls": "list", "pull": "models", "download": "models", "encode": "embed", "image": "generate",
    "watch": "top", "benchmark": "bench", "check": "doctor", "info": "doctor", "keys": "key",
    "rm": "remove", "delete": "remove", "new": "create", "settings": "config",
}  # fmt: skip
"""Commands by the names that other programs have for them."""


class _StoreModel(argparse.Action):
    """Stores the model, which is an argument or a flag, not both."""

    def __call__(
        self, _: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, __: str | None = None
    ) -> None:
        """Store the value; raise ArgumentError if there is another one."""
        if getattr(namespace, self.dest, None) not in (None, values):
            raise argparse.ArgumentError(
                None,
                f"two models are given, {short_repr(namespace.model)} and {short_repr(values)}; give one, "
                "and others as --additional-models",
            )
        namespace.model = values


class Parser(argparse.ArgumentParser):
    """An ArgumentParser without abbreviations of flags, whose errors are one line."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)
        self._groups: dict[str, Any] = {}

    def group(self, title: str) -> Any:
        """The group of arguments with a title, which is added if there is none."""
        if title not in self._groups:
            self._groups[title] = self.add_argument_group(title)
        return self._groups[title]

    def error(self, message: str) -> NoReturn:
        """Print `message` and a hint to --help; exit with status 2."""
        with contextlib.suppress(OSError):
            sys.stderr.write(f"noria: error: {message} (try: {self.prog} --help)\n")
        raise SystemExit(2)

    def suggest_flag(self, got: str) -> str:
        """A sentence with the flag that was meant, or an empty string: also for the key of a setting as a flag."""
        by_key = {setting.key: setting.flag for setting in list_settings()}
        meanings = {f"--{key.replace('_', '-')}": flag for key, flag in by_key.items()}
        meanings |= {key.replace(".", "-"): flag for key, flag in meanings.items()}
        meanings |= {f"--{name.replace('_', '-')}": by_key[key] for name, key in OTHER_NAMES.items()}
        if not got.startswith("-") and "--additional-models" in self.flags:
            return " Further models: --additional-models A,B."
        return did_you_mean(got, self.flags, meanings)

    def _print_message(self, message: str, file: Any = None) -> None:
        (file or sys.stderr).write(message)  # argparse ignores errors, so that half a help text is no failure

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Raise argparse.ArgumentError if `value` is no command."""
        if isinstance(action.choices, dict) and value not in action.choices:
            hint = did_you_mean(value, [*action.choices, *self.flags], _OTHER_COMMANDS)
            raise argparse.ArgumentError(
                None, f"{short_repr(value)} is no command.{hint} Commands: {', '.join(action.choices)}."
            )
        super()._check_value(action, value)

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
    parser.group(_FIRST_TITLE).add_argument(
        "model",
        nargs="?",
        action=_StoreModel,
        default=argparse.SUPPRESS,  # else it replaces the flag's value
        help="a folder in diffusers or transformers format, a file .safetensors or .gguf, a hub id, bundled (the "
        "default) or minilm",
    )
    parser.group(_FIRST_TITLE).add_argument("--model", action=_StoreModel, help="the same")
    add_settings(parser)


def add_settings(parser: Parser, *names: str) -> None:
    """Add --config, and a flag for each setting whose key or section is in `names`; without names all but the model."""
    wanted = {*names}
    selected = [
        each for each in list_settings() if ({each.key, each.path[0]} & wanted if names else each.key != "model")
    ]
    parser.group(_FIRST_TITLE).add_argument(
        "--config", metavar="FILE", help="TOML file of settings, as `noria config example` prints one"
    )
    for setting in sorted(selected, key=lambda each: each.key not in _FIRST):
        group = parser.group(_FIRST_TITLE) if setting.key in _FIRST else parser.group(_title(setting))
        text = f"{setting.description} ({toml_value(setting.default)})".replace("%", "%%")
        if "true" in (words := allowed(setting).split(", ")):
            group.add_argument(
                setting.flag, dest=setting.key, action=argparse.BooleanOptionalAction, default=None, help=text
            )
            if "auto" in words:
                flag = f"{setting.flag[:2]}auto-{setting.flag[2:]}"
                group.add_argument(flag, dest=setting.key, action="store_const", const="auto", help="the same, `auto`")
        else:
            metavar = allowed(setting).replace(", ", "|").replace(" ", "") or setting.path[-1].upper()
            group.add_argument(setting.flag, dest=setting.key, metavar=metavar, help=text)


def _title(setting: Setting) -> str:
    return f"settings [{setting.path[0]}]" if len(setting.path) > 1 else "settings"


def config_from(arguments: argparse.Namespace) -> Config:
    """The configuration from the file, the environment and the given flags."""
    flags = {setting.key: getattr(arguments, setting.key, None) for setting in list_settings()}
    return load(arguments.config, os.environ, {key: value for key, value in flags.items() if value is not None})
