"""The settings: one frozen tree, read once from file < environment < flags, and never again.

Each setting is declared once, in a field below, with its unit, default and effect; the TOML file, the environment variables
(`NORIA_ENGINE_SLOTS`), the flags (`--slots`) and docs/settings.md all come from that declaration. Unknown keys are errors.
"""

import json
import os
import pathlib
import re
import tomllib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

from noria.errors import ConfigError, did_you_mean, shown

Auto = Literal["auto"]

_KUBERNETES = re.compile(r"NORIA(_\w+)?_(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_\w+)?)")
_KUBERNETES_URL = re.compile(r"(tcp|udp|sctp)://")
"""What Kubernetes puts into every pod of a namespace that has a Service named `noria` or `noria-…`; none of it is a setting.

Names that only Kubernetes gives, and `NORIA_PORT` or `NORIA_…_PORT` where the value is a URL.
"""


class EngineConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How a device runs the model."""

    devices: Annotated[
        tuple[Annotated[str, Meta(pattern=r"^(auto|cpu|cuda(:\d{1,3})?)$")], ...],
        Meta(
            min_length=1,
            description="one engine process each: `auto` (the GPU if there is one, else the CPU), `cpu`, `cuda` or `cuda:N`",
        ),
    ] = ("auto",)
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        Meta(description="precision of the model; `auto` is float16 on a GPU and float32 on a CPU"),
    ] = "auto"
    slots: Annotated[
        Annotated[int, Meta(ge=1, le=256)] | Auto,
        Meta(
            description="images in the running batch; `auto` is 32 on a GPU, 16 on a CPU, 2 on a CPU with a full-size model"
        ),
    ] = "auto"
    buckets: Annotated[
        tuple[Annotated[int, Meta(ge=1, le=1024)], ...],
        Meta(
            description="numbers of UNet rows that a step is padded up to (a guided image has two); empty is no padding, "
            "one number makes every image bitwise independent of the load"
        ),
    ] = ()
    decode_batch: Annotated[
        int,
        Meta(
            ge=1, le=64, description="most images that one turn decodes, so that running images never wait for a crowd"
        ),
    ] = 4
    policy: Annotated[
        Literal["least-slack", "fcfs", "shortest-first"],
        Meta(description="who goes first when not all can: docs/scheduling.md"),
    ] = "least-slack"
    queue_limit_s: Annotated[
        float,
        Meta(
            gt=0,
            le=86400,
            description="seconds of work that may be ahead of an image that has to wait; more is refused with 429",
        ),
    ] = 120.0
    cache_dir: Annotated[
        str,
        Meta(description="folder in which measured costs are kept; empty is `noria` in XDG_CACHE_HOME or ~/.cache"),
    ] = ""
    queue_limit: Annotated[int, Meta(ge=0, description="most images waiting for a slot; more are refused with 429")] = (
        256
    )
    threads: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | Auto,
        Meta(description="CPU threads of one operation; `auto` is the usable cores over the engines"),
    ] = "auto"
    attention: Annotated[
        Literal["sdpa", "plain", "sliced", "xformers"],
        Meta(
            description="`sdpa` and `xformers` are memory-efficient; `sliced` is attention slicing; `plain` is neither"
        ),
    ] = "sdpa"
    channels_last: Annotated[bool, Meta(description="keep the UNet's and VAE's tensors in NHWC memory order")] = True
    cudnn_benchmark: Annotated[
        bool, Meta(description="let cuDNN time its algorithms for each bucket (on a GPU, and only with buckets)")
    ] = True
    inference_mode: Annotated[bool, Meta(description="run under torch.inference_mode; false is torch.no_grad")] = True
    compile: Annotated[bool, Meta(description="torch.compile the UNet: about a minute at start-up; needs buckets")] = (
        False
    )
    embedding_cache: Annotated[int, Meta(ge=0, description="encoded prompts kept for re-use, in prompts")] = 256
    hang_timeout_s: Annotated[
        float,
        Meta(
            ge=1,
            le=86400,
            description="an engine whose turn takes longer than this, and longer than ten times its longest turn so far, or that "
            "answers nothing for so long, is killed and started again",
        ),
    ] = 60.0
    start_timeout_s: Annotated[
        float,
        Meta(
            ge=1,
            le=86400,
            description="an engine that has not loaded and warmed up after this many seconds is killed and started again",
        ),
    ] = 900.0


class FrontendConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How requests come in."""

    host: Annotated[str, Meta(description="address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="port to listen on; 0 takes a free one and prints it")] = 8000
    processes: Annotated[int, Meta(ge=1, le=64, description="front-end processes sharing the port")] = 1
    max_body_bytes: Annotated[int, Meta(ge=1024, description="longest request body read")] = 1_048_576
    max_images: Annotated[int, Meta(ge=1, le=1024, description="most images that one request may ask for")] = 16
    max_steps: Annotated[int, Meta(ge=1, le=1000, description="most inference steps that one request may ask for")] = (
        200
    )
    max_prompt_chars: Annotated[int, Meta(ge=1, description="longest prompt, in characters")] = 4000
    request_timeout_s: Annotated[
        float,
        Meta(
            ge=0.001,
            le=86400,
            description="a request not done after this many seconds leaves the wheel and is answered 504",
        ),
    ] = 600.0
    restart_wait_s: Annotated[
        float,
        Meta(
            ge=0,
            le=86400,
            description="how long a request whose engine ended waits for a new one before it is answered 503",
        ),
    ] = 60.0
    drain_s: Annotated[
        float,
        Meta(
            ge=0,
            le=86400,
            description="after SIGTERM, how long what is in flight may still take; the rest is answered 503 with Retry-After. "
            "All has ended 10 s later: within Kubernetes' 30 s",
        ),
    ] = 20.0
    keys_file: Annotated[
        str,
        Meta(
            description="TOML file of API keys and their limits (`noria key`), read at the start; empty is no keys: whoever reaches the port "
            "may ask for images"
        ),
    ] = ""


class JobsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How requests are kept that nobody waits for."""

    database: Annotated[
        str,
        Meta(
            description="where jobs are kept: `auto` is SQLite in `data_dir`, else `sqlite:///FILE` or `postgresql://USER@HOST/NAME` "
            "(a password goes into PGPASSWORD or PGPASSFILE: process listings show settings)"
        ),
    ] = "auto"
    results: Annotated[
        str,
        Meta(
            description="folder of the images of jobs, a path or a URL that fsspec knows, without a password; `auto` is `results` in `data_dir`"
        ),
    ] = "auto"
    ttl_s: Annotated[
        float,
        Meta(
            ge=60,
            le=31_536_000,
            description="an ended job and its images are deleted after this many seconds, and a job that nobody could draw for as long fails",
        ),
    ] = 86_400.0
    concurrency: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | Auto,
        Meta(description="jobs that one front end has drawn at once; `auto` is enough to fill the engines twice"),
    ] = "auto"
    max_queued: Annotated[int, Meta(ge=0, description="most jobs waiting to be drawn; more are refused with 429")] = (
        10_000
    )
    webhook_secret_file: Annotated[
        str,
        Meta(
            description="file with the secret that signs webhooks, `whsec_` and base64; `auto` is `webhook-secret` in `data_dir`, "
            "made at the first start"
        ),
    ] = "auto"  # noqa: S105 - where it is, not what
    webhook_allow_private: Annotated[
        bool,
        Meta(description="let webhooks go to loopback, private and other addresses that are not public"),
    ] = False


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    """The whole: what is served, by which engines, through which front ends."""

    model: Annotated[str, Meta(description="a folder in diffusers format, a hub id, or `bundled`")] = "bundled"
    more_models: Annotated[
        tuple[str, ...],
        Meta(description="further models, served by the same engines to requests that name them as `model`"),
    ] = ()
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="least severe event that is logged")
    ] = "info"
    data_dir: Annotated[
        str,
        Meta(
            description="folder of what outlives the server, such as jobs; `auto` is `noria` in $XDG_DATA_HOME, else in ~/.local/share"
        ),
    ] = "auto"
    engine: EngineConfig = msgspec.field(default_factory=EngineConfig)
    frontend: FrontendConfig = msgspec.field(default_factory=FrontendConfig)
    jobs: JobsConfig = msgspec.field(default_factory=JobsConfig)


def data_folder(config: Config, environment: Mapping[str, str]) -> pathlib.Path:
    """Where `config.data_dir` is on this machine; nothing is made there.

    As the XDG Base Directory Specification has it, a relative $XDG_DATA_HOME counts as none.

    Raises:
        ConfigError: `auto`, and there is no home either.

    """
    if config.data_dir != "auto":
        return pathlib.Path(config.data_dir).absolute()
    home = pathlib.Path(environment.get("XDG_DATA_HOME", ""))
    if home.is_absolute():
        return home / "noria"
    try:
        return pathlib.Path.home() / ".local" / "share" / "noria"
    except RuntimeError as error:
        raise ConfigError(
            "setting data_dir is 'auto', and there is neither $XDG_DATA_HOME nor a home. Set --data-dir FOLDER."
        ) from error


class Setting(Struct, frozen=True):
    """One declared setting, as flags, environment and documentation see it."""

    path: tuple[str, ...]  # where it stands in the tree: ("engine", "slots")
    kind: Any  # its annotated type
    default: Any
    description: str

    @property
    def key(self) -> str:
        """As the TOML file writes it: `engine.slots`."""
        return ".".join(self.path)

    @property
    def variable(self) -> str:
        """Its environment variable: `NORIA_ENGINE_SLOTS`."""
        return "_".join(("NORIA", *self.path)).upper()

    @property
    def flag(self) -> str:
        """Its command-line flag, `--slots`; names are unique across the tree."""
        return "--" + self.path[-1].replace("_", "-")


def settings(struct: type[Struct] = Config, prefix: tuple[str, ...] = ()) -> list[Setting]:
    """Every setting of the tree, in the order of declaration."""
    found: list[Setting] = []
    for field in msgspec.structs.fields(struct):
        path = (*prefix, field.name)
        if isinstance(field.type, type) and issubclass(field.type, Struct):
            found += settings(field.type, path)
            continue
        descriptions = [
            meta.description for meta in get_args(field.type)[1:] if isinstance(meta, Meta) and meta.description
        ]
        assert len(descriptions) == 1, f"{path} needs one description"
        found.append(Setting(path, field.type, field.default, descriptions[0]))
    return found


def load(file: str | os.PathLike[str] | None, environment: Mapping[str, str], flags: Mapping[str, Any]) -> Config:
    """The configuration from a TOML `file` (or none), `environment`, and `flags` by setting key; later ones win.

    Flags and environment give strings; they are read as TOML values where the setting is not a string.

    Raises:
        ConfigError: an unreadable file, an unknown key (with the nearest known one), or a value that is not allowed.

    """
    tree: dict[str, Any] = _read_file(pathlib.Path(file)) if file is not None else {}
    known = {setting.variable: setting for setting in settings()}
    for name, text in environment.items():
        if not name.startswith("NORIA_") or _is_from_kubernetes(name, text):
            continue
        if name not in known:
            raise ConfigError(
                f"environment variable {name} is not a setting.{did_you_mean(name, known)} See docs/settings.md."
            )
        _put(tree, known[name], text, f"environment variable {name}")
    by_key = {setting.key: setting for setting in settings()}
    for key, value in flags.items():
        _put(tree, by_key[key], value, f"flag {by_key[key].flag}")
    return _convert(tree)


def _is_from_kubernetes(name: str, text: str) -> bool:
    """Whether the variable describes a Service; some of their names are also a setting's, none of their values is."""
    if _KUBERNETES.fullmatch(name):
        return True
    return name.endswith("_PORT") and _KUBERNETES_URL.match(text) is not None


def _read_file(file: pathlib.Path) -> dict[str, Any]:
    try:
        tree = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration file {file} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"the configuration file {file} is not TOML: {error}") from error
    _refuse_unknown(tree, Config, str(file), "")
    return tree


def _refuse_unknown(tree: dict[str, Any], struct: type[Struct], where: str, prefix: str) -> None:
    fields = {field.name: field.type for field in msgspec.structs.fields(struct)}
    for key, value in tree.items():
        if key not in fields:
            raise ConfigError(
                f"{where}: unknown key {prefix + key!r}.{did_you_mean(key, fields)} Known here: {', '.join(fields)}."
            )
        kind = fields[key]
        if isinstance(kind, type) and issubclass(kind, Struct):
            if not isinstance(value, dict):
                raise ConfigError(
                    f"{where}: {prefix}{key} is {shown(value)}; it is a table: write [{prefix}{key}] and its keys below."
                )
            _refuse_unknown(value, kind, where, f"{prefix}{key}.")


def _put(tree: dict[str, Any], setting: Setting, value: Any, source: str) -> None:
    *parents, name = setting.path
    for parent in parents:
        tree = tree.setdefault(parent, {})
    tree[name] = _parsed(value, setting, source) if isinstance(value, str) else value


def _parsed(text: str, setting: Setting, source: str) -> Any:
    """`text` as the setting's type wants it; strings stay, `true`, numbers and comma-separated lists are read."""
    value: Any = text
    if get_origin(get_args(setting.kind)[0]) is tuple:
        value = [part.strip() for part in text.strip("[]").split(",") if part.strip()]
    try:
        return msgspec.to_builtins(msgspec.convert(value, setting.kind, strict=False))
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source} is {shown(text)}: {_in_words(error)}. {_about(setting)}") from error


def _convert(tree: dict[str, Any]) -> Config:
    try:
        return msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        place = str(error).rpartition(" - at `$.")[2].rstrip("`").partition("[")[0]
        known = {setting.key: setting for setting in settings()}
        got = _value_at(tree, place)
        about = _about(known[place]) if place in known else ""
        raise ConfigError(f"setting {place} is {shown(got)}: {_in_words(error)}. {about}") from error


def _value_at(tree: Any, place: str) -> Any:
    for part in place.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else tree
    return tree


def _in_words(error: msgspec.ValidationError) -> str:
    text = str(error).partition(" - at `")[0]
    return "not a value it can have" if text.startswith("Invalid enum") else text[:1].lower() + text[1:]


def _about(setting: Setting) -> str:
    words = allowed(setting)
    return f"{setting.key} is: {setting.description}." + (f" Allowed: {words}." if words else "")


def allowed(setting: Setting) -> str:
    """The words and numbers that `setting` may be, comma-separated; empty where it is free."""
    return ", ".join(_allowed(setting.kind))


def _allowed(kind: Any) -> list[str]:
    if kind is bool:
        return ["true", "false"]
    if get_origin(kind) is Literal:
        return [str(value) for value in get_args(kind)]
    if get_origin(kind) is Annotated and get_args(kind)[0] in (int, float):
        return [bounds for meta in get_args(kind)[1:] if (bounds := _bounds(meta))]
    if get_origin(kind) is Annotated:
        return _allowed(get_args(kind)[0])
    return [words for part in get_args(kind) if part is not Ellipsis for words in _allowed(part)]


def _bounds(meta: Meta) -> str:
    if meta.ge is None:
        return f"> {meta.gt}, ≤ {meta.le}"
    return f"≥ {meta.ge}" if meta.le is None else f"{meta.ge}–{meta.le}"


def settings_page() -> str:
    """docs/settings.md: every setting as it is declared above; `make docs` writes it."""
    lines = [
        "# Settings",
        "",
        "Read once at start-up from a TOML file (`noria serve --config FILE`), then environment variables, then flags; the later one",
        "wins. A key or `NORIA_` variable that does not exist is an error. Lists are comma-separated in variables and flags; a flag",
        "that is true or false is written `--flag` or `--no-flag`. This page is written by `make docs` from `src/noria/config.py`.",
    ]
    section: tuple[str, ...] | None = None
    for setting in settings():
        if setting.path[:-1] != section:
            section = setting.path[:-1]
            title = f"## `[{'.'.join(section)}]`" if section else "## At the top of the file"
            columns = ["| key | variable | flag | default | allowed | what it is |", "|---|---|---|---|---|---|"]
            lines += ["", title, "", *columns]
        cells = (
            f"`{setting.path[-1]}`",
            f"`{setting.variable}`",
            f"`{setting.flag}`",
            f"`{toml_value(setting.default)}`",
        )
        lines.append(f"| {' | '.join(cells)} | {allowed(setting)} | {setting.description} |")
    return "\n".join(lines) + "\n"


def toml_value(value: object) -> str:
    """A default as the TOML file writes it."""
    return json.dumps(list(value) if isinstance(value, tuple) else value)
