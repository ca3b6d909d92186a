"""The settings of a server on Ray."""

from typing import Annotated

from msgspec import Meta, Struct

from noria.config.auto import Auto


class ClusterConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How a server on Ray is spread: `noria serve --on`, `serve run noria.cluster:app`. Else unused."""

    engine_replicas: Annotated[
        Annotated[int, Meta(ge=1, le=10_000)] | Annotated[str, Meta(pattern=r"^\d{1,5}-\d{1,5}\Z")],
        Meta(
            description="engines of each model, each with one device: a number, or a range such as `1-8`, which "
            "follows the backlog: docs/ray.md"
        ),
    ] = 1
    frontend_replicas: Annotated[int, Meta(ge=1, le=1000, description="front ends")] = 1
    max_engines_per_node: Annotated[
        Annotated[int, Meta(ge=1, le=1024)] | Auto,
        Meta(description="engines of one model on one node; `auto` sets no limit"),
    ] = "auto"
    engine_gpus: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | Auto,
        Meta(
            description="GPUs, or the share of one, that Ray reserves for an engine; `auto` is 1 if Ray has GPUs and "
            "`engine.devices` asks for no CPU"
        ),
    ] = "auto"
    engine_cpus: Annotated[
        float,
        Meta(ge=0, le=1024, description="CPUs that Ray reserves for an engine; without GPU also its `engine.threads`"),
    ] = 1.0
    engine_memory_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="memory that Ray reserves on a node for an engine; no engine is limited to it",
        ),
    ] = 0
    target_backlog_s: Annotated[
        float,
        Meta(
            gt=0,
            le=86400,
            description="backlog of an engine, in seconds of work, above which a range of "
            "`engine_replicas` adds engines",
        ),
    ] = 10.0
