"""Reads the settings that `noria.config` declares: once, at start-up, from file < environment < flags.

Unknown keys are errors.
"""

import functools
import json
import os
import pathlib
import re
import textwrap
import tomllib
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

from noria.config import Config
from noria.errors import ConfigError, did_you_mean, short_repr
from noria.errors.decode_text import rejection, value_at

_KUBERNETES_VARIABLE = re.compile(r"NORIA(_\w+)?_(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")
_KUBERNETES_URL = re.compile(r"(tcp|udp|sctp)://")
"""Variables that Kubernetes sets in each pod beside a Service named `noria` or `noria-…`; they are no settings.

These are the names that only Kubernetes uses, and `NORIA_PORT` or `NORIA_…_PORT` if the value is a URL.
"""

API_KEY_VARIABLE = "NORIA_API_KEY"
OTHER_VARIABLES = {
    API_KEY_VARIABLE: "the API key that commands send to a server, as `noria top` does; the commands that pages and "
    "`noria serve` print read it, too",
    "NORIA_MEMORY": "the memory limit of the server's container, read by `deploy/compose.yaml`",
}
"""Variables that are no settings, by name, with what reads them."""


OTHER_NAMES = {
    "address": "frontend.host", "bind": "frontend.host", "hostname": "frontend.host", "ip": "frontend.host",
    "listen": "frontend.host", "server_name": "frontend.allowed_hosts",
    "socket": "frontend.uds", "unix_socket": "frontend.uds", "workers": "frontend.processes",
    "api_key": "frontend.api_keys_file", "api_keys": "frontend.api_keys_file", "key_file": "frontend.api_keys_file",
    "keys": "frontend.api_keys_file", "certfile": "frontend.ssl_certfile", "tls_cert": "frontend.ssl_certfile",
    "timeout": "frontend.request_timeout_s", "gpu": "engine.devices", "gpus": "engine.devices",
    "device": "engine.devices", "cuda": "engine.devices", "precision": "engine.dtype", "half": "engine.dtype",
    "max_num_seqs": "engine.slots", "batch_size": "engine.slots", "max_batch_size": "engine.slots",
    "lora": "engine.loras", "controlnet": "engine.controlnets", "max_queue": "engine.queue_limit",
    "model_id": "model", "model_name": "model", "model_path": "model", "checkpoint": "model", "ckpt": "model",
    "ckpt_dir": "engine.checkpoints", "checkpoint_dir": "engine.checkpoints",
    "models": "additional_models", "verbose": "log_level", "quiet": "log_level", "debug": "log_level",
    "loglevel": "log_level", "otlp_endpoint": "traces_endpoint", "data": "data_dir",
}  # fmt: skip
"""Keys of settings by the names that other programs have for them."""


class Setting(Struct, frozen=True):
    """A declared setting, as flags, environment and documentation see it."""

    path: tuple[str, ...]  # in the tree: ("engine", "slots")
    annotation: Any  # its annotated type
    default: Any
    description: str

    @property
    def key(self) -> str:
        """Its key in the TOML file: `engine.slots`."""
        return ".".join(self.path)

    @property
    def variable(self) -> str:
        """Its environment variable: `NORIA_ENGINE_SLOTS`."""
        return "_".join(("NORIA", *self.path)).upper()

    @property
    def flag(self) -> str:
        """Its command-line flag: `--slots`; with its section, `--registry-database`, of registry and statistics."""
        names = self.path if self.path[0] in ("registry", "statistics") else self.path[-1:]
        return "--" + "-".join(names).replace("_", "-")


def list_settings(struct: type[Struct] = Config, prefix: tuple[str, ...] = ()) -> list[Setting]:
    """Every setting of the tree, in the order of declaration."""
    found: list[Setting] = []
    for field in msgspec.structs.fields(struct):
        path = (*prefix, field.name)
        if isinstance(field.type, type) and issubclass(field.type, Struct):
            found += list_settings(field.type, path)
            continue
        descriptions = [
            meta.description for meta in get_args(field.type)[1:] if isinstance(meta, Meta) and meta.description
        ]
        assert len(descriptions) == 1, f"{path} needs one description"
        found.append(Setting(path, field.type, field.default, descriptions[0]))
    return found


def load(file: str | os.PathLike[str] | None, environment: Mapping[str, str], flags: Mapping[str, Any]) -> Config:
    """Merge a TOML `file` (or none), `environment`, and `flags` by setting key into a Config; later sources win.

    Flags and variables are strings; they are parsed as the type of the setting. An empty variable counts as not set.

    Raises ConfigError: an unreadable file, an unknown key (with the nearest known one), or a value that is not allowed.
    """
    tree: dict[str, Any] = _read_file(pathlib.Path(file)) if file is not None else {}
    known = {setting.variable: setting for setting in list_settings()}
    for name, text in environment.items():
        if not name.startswith("NORIA_") or name in OTHER_VARIABLES or _is_from_kubernetes(name, text):
            continue
        if name not in known:
            variables = {setting.key: setting.variable for setting in known.values()}
            meanings = {f"NORIA_{other}".upper(): variables[key] for other, key in OTHER_NAMES.items()}
            raise ConfigError(
                f"environment variable {name} is not a setting.{did_you_mean(name, known, meanings)} See "
                "docs/settings.md."
            )
        if text.strip():  # compose, Helm and .env files make empty ones of what is not set
            _put(tree, known[name], text, f"environment variable {name}")
    by_key = {setting.key: setting for setting in list_settings()}
    for key, value in flags.items():
        _put(tree, by_key[key], value, f"flag {by_key[key].flag}")
    return _convert(tree)


def empty_list_warnings(environment: Mapping[str, str], config: Config) -> list[str]:
    """Return a warning for each empty variable of a list that has elements in `config`: none may have been meant."""
    warnings = []
    for setting in list_settings():
        value: Any = functools.reduce(getattr, setting.path, config)
        needs_element = any(isinstance(meta, Meta) and meta.min_length for meta in get_args(setting.annotation))
        if (
            isinstance(value, tuple)
            and value
            and not needs_element
            and not environment.get(setting.variable, "any").strip()
        ):
            warnings.append(
                f"environment variable {setting.variable} is empty, which counts as not set: {setting.key} is "
                f"{short_repr(list(value))}. Remove the variable, or set it to [] for an empty list"
            )
    return warnings


def _is_from_kubernetes(name: str, text: str) -> bool:
    """Whether the variable describes a Service. A name may be that of a setting, too; a value never is."""
    if _KUBERNETES_VARIABLE.fullmatch(name):
        return True
    return name.endswith("_PORT") and _KUBERNETES_URL.match(text) is not None


def _read_file(file: pathlib.Path) -> dict[str, Any]:
    try:
        tree = tomllib.loads(file.read_text(encoding="utf-8-sig"))  # Windows' editors begin with a mark
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration file {file} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the configuration file {file} is not TOML: {error}") from error
    _reject_unknown(tree, Config, str(file), "")
    return tree


def _reject_unknown(tree: dict[str, Any], struct: type[Struct], where: str, prefix: str) -> None:
    fields = {field.name: field.type for field in msgspec.structs.fields(struct)}
    for key, value in tree.items():
        if key not in fields:
            raise ConfigError(
                f"{where}: unknown key {prefix + key!r}.{_suggest_key(key, fields)} Known keys: {', '.join(fields)}."
            )
        field_type = fields[key]
        if isinstance(field_type, type) and issubclass(field_type, Struct):
            if not isinstance(value, dict):
                raise ConfigError(
                    f"{where}: {prefix}{key} is {short_repr(value)}; it must be a table: write [{prefix}{key}] and its "
                    "keys below."
                )
            _reject_unknown(value, field_type, where, f"{prefix}{key}.")


def _suggest_key(got: str, fields: Iterable[str]) -> str:
    """A sentence with the key that was meant: of this table, else of another."""
    keys = [setting.key for setting in list_settings()]
    return did_you_mean(got, fields) or did_you_mean(
        got, keys, {key.rpartition(".")[2]: key for key in reversed(keys)} | OTHER_NAMES
    )


def _put(tree: dict[str, Any], setting: Setting, value: Any, source: str) -> None:
    *parents, name = setting.path
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[name] = _parse(value, setting, source) if isinstance(value, str) else value


def _parse(text: str, setting: Setting, source: str) -> Any:
    """`text` converted to the type of the setting.

    It is a string, `true` or `false`, a number, a comma-separated list, or an array of tables as TOML has it.
    """
    value: Any = text
    declared = get_args(setting.annotation)[0]
    if get_origin(declared) is tuple:
        parts = (part.strip().strip("\"'") for part in text.strip().strip("[]").split(","))  # also as JSON has it
        value = [part for part in parts if part]
        if not value and "".join(text.split()) not in ("", "[]"):
            raise ConfigError(
                f"{source} is {short_repr(text)}, a list without an element. Write [] for an empty list, or leave it "
                f"out. {_describe(setting)}"
            )
        if isinstance(get_args(declared)[0], type) and issubclass(get_args(declared)[0], Struct):
            value = _parse_toml(text, setting, source)
    if text.isascii() and text.isdecimal() and _takes_int_and_text(declared):
        value = int(text)  # msgspec would keep the text
    try:
        return msgspec.to_builtins(msgspec.convert(value, setting.annotation, strict=False))
    except msgspec.ValidationError as error:
        reason = rejection(error, setting.annotation)[1]
        raise ConfigError(f"{source} is {short_repr(text)}; {reason}. {_describe(setting)}") from error


def _takes_int_and_text(declared: Any) -> bool:
    members = [get_args(part)[0] for part in get_args(declared) if get_origin(part) is Annotated]
    return {int, str} <= set(members)


def _parse_toml(text: str, setting: Setting, source: str) -> Any:
    try:
        return tomllib.loads(f"value = {text or '[]'}")["value"]
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(
            f"{source} is {short_repr(text)}, which is not TOML: {error}. {_describe(setting)}"
        ) from error


def _convert(tree: dict[str, Any]) -> Config:
    try:
        return msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        known = {setting.key: setting for setting in list_settings()}
        path, reason = rejection(error, Config)
        key = path.partition("[")[0]
        description = _describe(known[key]) if key in known else ""
        value = short_repr(value_at(tree, path))
        raise ConfigError(f"setting {path} is {value}; {reason}. {description}") from error


def _describe(setting: Setting) -> str:
    allowed_text = allowed(setting)
    return f"{setting.key} is: {setting.description}." + (f" Allowed: {allowed_text}." if allowed_text else "")


def allowed(setting: Setting) -> str:
    """The words and ranges that `setting` allows, comma-separated; empty if any text is allowed."""
    return ", ".join(_allowed(setting.annotation))


def _allowed(annotation: Any) -> list[str]:
    if annotation is bool:
        return ["true", "false"]
    if get_origin(annotation) is Literal:
        return [str(value) for value in get_args(annotation)]
    if get_origin(annotation) is Annotated and get_args(annotation)[0] in (int, float):
        return [bounds for meta in get_args(annotation)[1:] if (bounds := _bounds(meta))]
    if get_origin(annotation) is Annotated:
        return _allowed(get_args(annotation)[0])
    return [text for part in get_args(annotation) if part is not Ellipsis for text in _allowed(part)]


def _bounds(meta: Meta) -> str:
    if meta.ge is None:
        return f"> {meta.gt}, ≤ {meta.le}"
    return f"≥ {meta.ge}" if meta.le is None else f"{meta.ge}–{meta.le}"


def example_file() -> str:
    """A TOML file with every setting in a comment, below its description, with its default and what is allowed."""
    lines = [
        "# Settings of noria serve --config FILE. Remove the # before a setting to change it.",
        "# Variables and flags override this file. Relative paths begin where noria is started.",
    ]
    section: tuple[str, ...] = ()
    for setting in list_settings():
        if setting.path[:-1] != section:
            section = setting.path[:-1]
            lines += ["", f"[{'.'.join(section)}]"]
        allowed_text = f" Allowed: {text}." if (text := allowed(setting)) else ""
        comment = f"{setting.description[:1].upper()}{setting.description[1:]}.{allowed_text}"
        lines += ["", *textwrap.wrap(comment, 98, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)]
        lines.append(f"# {setting.path[-1]} = {toml_value(setting.default)}")
    return "\n".join(lines) + "\n"


def settings_docs() -> str:
    """The text of docs/settings.md; `make docs` writes it."""
    lines = [
        "# Settings",
        "",
        "Settings are read once, at start-up, from a TOML file (`noria serve --config FILE`), environment",
        "variables and flags; later sources win. A variable is `NORIA_`, the section, if any, and the key, in",
        "capitals: `NORIA_ENGINE_SLOTS`; an empty one counts as not set. Unknown keys are errors, and so are",
        "unknown variables `NORIA_…`, but for those that Kubernetes sets for Services. Lists are",
        "comma-separated in variables and flags, `[]` is an empty one; boolean flags are `--flag`,",
        "`--no-flag`, and `--auto-flag` of those that can be `auto`. Relative paths, in a file too, are",
        "below the folder where `noria` is started. `noria config example` prints a file with all settings.",
        "`make docs` writes this page from `src/noria/config/`.",
    ]
    section: tuple[str, ...] | None = None
    for setting in list_settings():
        if setting.path[:-1] != section:
            section = setting.path[:-1]
            title = f"## `[{'.'.join(section)}]`" if section else "## At the top of the file"
            lines += ["", title, "", "| key | flag | default | allowed | description |", "|---|---|---|---|---|"]
        cells = (f"`{setting.path[-1]}`", f"`{setting.flag}`", f"`{toml_value(setting.default)}`")
        lines.append(f"| {' | '.join(cells)} | {allowed(setting)} | {setting.description} |")
    lines += ["", "## Other variables", "", "| variable | description |", "|---|---|"]
    lines += [f"| `{name}` | {description} |" for name, description in OTHER_VARIABLES.items()]
    return "\n".join(lines) + "\n"


def toml_value(value: object) -> str:
    """A default value in TOML syntax."""
    return json.dumps(list(value) if isinstance(value, tuple) else value)
