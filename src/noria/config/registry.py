"""The settings of the registry: its database, and the sources of models."""

from typing import Annotated

from msgspec import Meta, Struct


class RegistryConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Where models, their versions, and what made them are registered."""

    database: Annotated[
        str,
        Meta(description="database of the registry, as `jobs.database`, which may be the same"),
    ] = "auto"
    deployments: Annotated[
        bool,
        Meta(description="follow the registry's deployments; else serve the models of the configuration only"),
    ] = True
    lineage_events_per_minute: Annotated[
        int, Meta(ge=1, description="lineage events that one API key, or one client without keys, may send a minute")
    ] = 6000
    lineage_mib_per_minute: Annotated[
        float, Meta(gt=0, le=100_000, description="bodies of lineage of one key, or one client without, a minute, MiB")
    ] = 16.0
    max_lineage_mib: Annotated[
        float,
        Meta(
            gt=0,
            le=1e9,
            description="lineage kept of one API key, MiB on the disk; none is ever deleted",
        ),
    ] = 1024.0
    source_roots: Annotated[
        tuple[str, ...],
        Meta(
            description="folders and URLs (`s3://BUCKET/FOLDER`) below which `POST /v1/registry/versions` may read "
            "models, besides the hub, the environment's MLflow server, and models in packages"
        ),
    ] = ()
    max_source_gib: Annotated[
        float, Meta(gt=0, le=100_000, description="largest model that `POST /v1/registry/versions` copies, GiB")
    ] = 64.0
