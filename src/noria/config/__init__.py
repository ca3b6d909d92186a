"""All settings: a frozen tree of structs, one field for each setting with its type, default and description.

A module here has the settings of one section; the whole tree is `Config`. `settings.py` derives the keys of the TOML
file, the environment variables (`NORIA_ENGINE_SLOTS`), the flags (`--slots`) and docs/settings.md from these
declarations.
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from noria.config.cluster import ClusterConfig
from noria.config.endpoints import EndpointConfig
from noria.config.engine import EngineConfig
from noria.config.frontend import FrontendConfig
from noria.config.jobs import JobsConfig
from noria.config.registry import RegistryConfig
from noria.config.variables import StatisticsConfig, VariableConfig, VariableKind

__all__ = [
    "ClusterConfig",
    "Config",
    "EndpointConfig",
    "EngineConfig",
    "FrontendConfig",
    "JobsConfig",
    "RegistryConfig",
    "StatisticsConfig",
    "VariableConfig",
    "VariableKind",
]


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    """The whole configuration: models, engines, front ends, jobs, registry, statistics, cluster, logs, traces."""

    model: Annotated[
        str,
        Meta(description="a folder, a file `.safetensors` or `.gguf`, a hub id, `bundled` or `minilm`"),
    ] = "bundled"
    additional_models: Annotated[
        tuple[str, ...],
        Meta(description="further models on the same devices; a request selects one with `model`"),
    ] = ()
    endpoints: Annotated[
        tuple[EndpointConfig, ...],
        Meta(
            description="endpoints with code of your own: [[endpoints]] tables in the file, in variables and "
            "flags a TOML array of tables: docs/user-code.md"
        ),
    ] = ()
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="minimum severity of logged events")
    ] = "info"
    log_format: Annotated[
        Literal["auto", "json", "text"],
        Meta(description="`json` is one object a line; `auto` is text on a terminal and JSON elsewhere"),
    ] = "auto"
    log_prompts: Annotated[
        Literal["off", "hash", "full"],
        Meta(description="prompts in logs: not at all, as SHA-256, or in full"),
    ] = "off"
    traces_endpoint: Annotated[
        str,
        Meta(
            description="URL of an OpenTelemetry collector, OTLP over HTTP (`http://HOST:4318/v1/traces`). Needs "
            "`noria-serve[traces]`: docs/traces.md"
        ),
    ] = ""
    traces_ratio: Annotated[
        float,
        Meta(ge=0, le=1, description="share of requests that are traced without a caller's decision"),
    ] = 1.0
    data_dir: Annotated[
        str,
        Meta(
            description="folder for jobs, the registry and other data; `auto` is `noria` in "
            "$XDG_DATA_HOME, else in ~/.local/share"
        ),
    ] = "auto"
    engine: EngineConfig = msgspec.field(default_factory=EngineConfig)
    frontend: FrontendConfig = msgspec.field(default_factory=FrontendConfig)
    jobs: JobsConfig = msgspec.field(default_factory=JobsConfig)
    registry: RegistryConfig = msgspec.field(default_factory=RegistryConfig)
    statistics: StatisticsConfig = msgspec.field(default_factory=StatisticsConfig)
    cluster: ClusterConfig = msgspec.field(default_factory=ClusterConfig)
