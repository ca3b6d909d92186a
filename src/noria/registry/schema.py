"""The tables of the registry.

**History** is append-only, by triggers: events, versions, deployments, routes. What is derived from it is an ordinary
table: `runs`, `run_entries` and `run_io` are folded from the `lineage_events` that are not struck out, `aliases` from
`alias_events`, and a deployment's head follows its events in the same transaction. `check.py` compares both.

**Digests** are `sha256:` and 64 hexadecimal digits. Times are Unix times in seconds.

The tables below `endpoints` are filled by deployments.
"""

import os
import pathlib

from sqlalchemy import (
    BigInteger,
    Column,
    Engine,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
    text,
)
from sqlalchemy.engine.url import URL

from noria.config import Config
from noria.folders import data_folder
from noria.storage import database
from noria.storage.append_only import make_append_only

_NUM_CONNECTIONS = 8

metadata = MetaData()
_BigInt = BigInteger().with_variant(Integer, "sqlite")  # SQLite numbers rows by INTEGER keys only


def _number(name: str = "id") -> Column[int]:
    """A primary key that the database counts up."""
    return Column(name, _BigInt, primary_key=True, autoincrement=True)


def _reference(name: str, target: str, *, primary_key: bool = False, nullable: bool = False) -> Column[int]:
    return Column(
        name, _BigInt, ForeignKey(f"noria_{target}"), primary_key=primary_key, nullable=nullable, autoincrement=False
    )


def _key() -> Column[str]:
    """A digest of the columns that identify a row, which may be longer than PostgreSQL's indexes take."""
    return Column("key", Text, nullable=False, unique=True)


def _time(name: str = "at") -> Column[float]:
    return Column(name, Float(53), nullable=False)


def _change() -> tuple[Column[float], Column[str], Column[str]]:
    """When something was changed, by whom and why."""
    return _time(), Column("by", Text, nullable=False), Column("why", Text, nullable=False)


# ── Data and runs ─────────────────────────────────────────────────────────────────────────────────────────────────────

datasets = Table(
    "noria_datasets",
    metadata,
    _number(),
    Column("namespace", Text, nullable=False),
    Column("name", Text, nullable=False),
    _key(),
)

# A version's parent is no column: it is the version of the same dataset that the run read which wrote this one.
dataset_versions = Table(
    "noria_dataset_versions",
    metadata,
    _number(),
    _reference("dataset_id", "datasets.id"),
    Column("version", Text, nullable=False),  # as its events name it; empty: they did not
    Column("digest", Text),  # what the version says of the content; null: nothing
    _key(),
    Index("noria_dataset_versions_digests", "digest"),
)

lineage_events = Table(
    "noria_lineage_events",
    metadata,
    _number("seq"),
    Column("digest", Text, nullable=False, unique=True),  # digest of the body; a repeated event has the same
    Column("run_id", Text),  # null: an event about no run
    _time(),  # as the event says
    _time("received_at"),
    Column("received_from", Text, nullable=False),  # an API key, or a user of the command line
    Column("body", Text, nullable=False),  # the whole event, as JSON with sorted keys
    Index("noria_lineage_events_runs", "run_id"),
)

runs = Table(
    "noria_runs",
    metadata,
    Column("run_id", Text, primary_key=True),
    Column("parent_id", Text),  # a step's run; it may be unknown yet
    Column("job_namespace", Text, nullable=False),
    Column("job_name", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("started_at", Float(53)),
    Column("ended_at", Float(53)),
    Column("state", Text, nullable=False),  # JSON of `openlineage.RunState` without what is in `run_entries`, `run_io`
    Column("owner", Text, nullable=False),  # `store.py`; empty: its events are struck out
    Column("num_events", _BigInt, nullable=False),  # received, struck out or not
    Column("num_bytes", _BigInt, nullable=False),  # size of their bodies
    Index("noria_runs_steps", "parent_id"),
)

run_entries = Table(  # the latest statement of each
    "noria_run_entries",
    metadata,
    Column("run_id", Text, ForeignKey("noria_runs.run_id"), primary_key=True),
    Column("field", Text, primary_key=True),  # "error", "metric" or "param"
    Column("key", Text, primary_key=True),  # a digest of the name
    Column("name", Text, nullable=False),
    Column("value", Text),  # as JSON; null: none
    _time(),  # time of the event that states it, as in `run_io`
    Column("digest", Text, nullable=False),  # digest of that event
)

struck_events = Table(  # events that count no more
    "noria_struck_events", metadata, _reference("event_seq", "lineage_events.seq", primary_key=True), *_change()
)

lineage_senders = Table(
    "noria_lineage_senders",
    metadata,
    Column("sender", Text, primary_key=True),  # `lineage_events.received_from`
    Column("num_bytes", _BigInt, nullable=False),  # the price (`run_rows.price_of`) of its events that count
)

run_io = Table(
    "noria_run_io",
    metadata,
    Column("run_id", Text, ForeignKey("noria_runs.run_id"), primary_key=True),
    Column("direction", Text, primary_key=True),  # "input" or "output"
    _reference("dataset_version_id", "dataset_versions.id", primary_key=True),
    Column("uri", Text),  # where the run read or wrote it
    Column("at", Float(53), nullable=False),
    Column("digest", Text, nullable=False),
    Index("noria_run_io_versions", "dataset_version_id", "direction"),
)

# ── Models ────────────────────────────────────────────────────────────────────────────────────────────────────────────

artifacts = Table(
    "noria_artifacts",
    metadata,
    Column("digest", Text, primary_key=True),
    Column("size_bytes", _BigInt, nullable=False),  # size of all files
    Column("manifest", Text, nullable=False),  # `manifest.py`; its own digest is `digest`
)

locations = Table(
    "noria_locations",
    metadata,
    Column("digest", Text, ForeignKey("noria_artifacts.digest"), primary_key=True),
    Column("url", Text, primary_key=True),
)

models = Table("noria_models", metadata, _number(), Column("name", Text, nullable=False, unique=True))

versions = Table(
    "noria_versions",
    metadata,
    _number(),
    _reference("model_id", "models.id"),
    Column("number", Integer, nullable=False),
    Column("manifest_digest", Text, ForeignKey("noria_artifacts.digest"), nullable=False),
    Column("code_digest", Text, nullable=False),  # digest of user code; empty without, as two nulls would differ
    Column("kind", Text, nullable=False),  # `ModelSpec.kind`
    Column("fingerprint", Text, nullable=False),  # `ModelSpec.fingerprint`, which image files have
    Column("source", Text, nullable=False),  # as it was named: a folder, "bundled"
    Column("revision", Text),  # set if the source has revisions
    UniqueConstraint("model_id", "number"),
    UniqueConstraint("model_id", "manifest_digest", "code_digest"),
    Index("noria_versions_manifests", "manifest_digest"),
    Index("noria_versions_fingerprints", "fingerprint"),
)

version_events = Table(
    "noria_version_events",
    metadata,
    _number("seq"),
    _reference("version_id", "versions.id"),
    Column("type", Text, nullable=False),  # "added" or "removed"; the last one holds
    *_change(),
    Index("noria_version_events_versions", "version_id"),
)

alias_events = Table(
    "noria_alias_events",
    metadata,
    _number("seq"),
    _reference("model_id", "models.id"),
    Column("alias", Text, nullable=False),
    _reference("version_id", "versions.id", nullable=True),  # null: the alias is deleted
    *_change(),
    Index("noria_alias_events_aliases", "model_id", "alias"),
)

# The tags of a version are what the last event of each key says.
tag_events = Table(
    "noria_tag_events",
    metadata,
    _number("seq"),
    _reference("version_id", "versions.id"),
    Column("key", Text, nullable=False),
    Column("value", Text),  # null: the tag is deleted
    *_change(),
    Index("noria_tag_events_versions", "version_id"),
)

aliases = Table(
    "noria_aliases",
    metadata,
    _reference("model_id", "models.id", primary_key=True),
    Column("alias", Text, primary_key=True),
    _reference("version_id", "versions.id"),
)

# ── Deployments ───────────────────────────────────────────────────────────────────────────────────────────────────────

endpoints = Table(
    "noria_endpoints",
    metadata,
    _number(),
    Column("name", Text, nullable=False, unique=True),
    Column("follow", Text),  # the alias or filter whose new versions are deployed; null: none
)

deployments = Table(
    "noria_deployments",
    metadata,
    _number(),
    _reference("endpoint_id", "endpoints.id"),
    Column("request_key", Text, nullable=False),  # the same command has the same, and resumes it
    _reference("version_id", "versions.id"),
    Column("settings", Text, nullable=False),
    Column("plan", Text, nullable=False),
    *_change(),
    UniqueConstraint("endpoint_id", "request_key"),
    Index("noria_deployments_versions", "version_id"),
)

deployment_events = Table(
    "noria_deployment_events",
    metadata,
    _reference("deployment_id", "deployments.id", primary_key=True),
    Column("number", Integer, primary_key=True, autoincrement=False),
    Column("type", Text, nullable=False),
    Column("traffic", Float(53)),  # share of the endpoint's requests from now on
    Column("generation", _BigInt),  # generation of the routes that it wrote
    Column("evidence", Text),
    *_change(),
)

deployment_heads = Table(
    "noria_deployment_heads",
    metadata,
    _reference("deployment_id", "deployments.id", primary_key=True),
    _reference("endpoint_id", "endpoints.id"),
    Column("state", Text, nullable=False),
    Column("finished_at", Float(53)),
    Column("owner", Text),
    Column("lease_until", Float(53)),
    Column("row_version", Integer, nullable=False),
    Index(  # an endpoint has one unfinished deployment; a second is rejected
        "noria_deployment_heads_unfinished",
        "endpoint_id",
        unique=True,
        sqlite_where=text("finished_at IS NULL"),
        postgresql_where=text("finished_at IS NULL"),
    ),
)

routes = Table(
    "noria_routes",
    metadata,
    Column("generation", _BigInt, primary_key=True, autoincrement=False),
    Column("routes", Text, nullable=False),
    _time(),
)

baselines = Table(  # the last row of a version's variable at an endpoint holds
    "noria_baselines",
    metadata,
    _number("seq"),
    _reference("version_id", "versions.id"),
    Column("endpoint", Text, nullable=False),
    Column("variable", Text, nullable=False),
    Column("counts", Text),  # JSON of a histogram or of counts of categories; null: it has no reference any more
    *_change(),
    Index("noria_baselines_versions", "version_id", "endpoint", "variable"),
)

HISTORY = (
    dataset_versions,
    lineage_events,
    struck_events,
    artifacts,
    versions,
    version_events,
    alias_events,
    tag_events,
    deployments,
    deployment_events,
    routes,
    baselines,
)
"""The append-only tables."""

make_append_only(metadata, *HISTORY)


SCHEMA = database.Schema(
    "registry",
    setting="registry.database",
    metadata=metadata,
    orders_writers=True,  # those of lineage yield to those of deployments
)


def open_registry(config: Config) -> Engine:
    """The database that `registry.database` names, with the registry's tables; `auto` is a SQLite file in `data_dir`.

    Raises ConfigError: see `storage.database`.
    """
    return open_registry_database(config.registry.database, data_folder(config, os.environ))


def open_registry_database(setting: str, folder: pathlib.Path) -> Engine:
    """The database of `open_registry`, from the setting and the data folder."""
    return database.open_database(SCHEMA, _url(setting, folder), _NUM_CONNECTIONS)


def registry_url(config: Config) -> URL:
    """The URL of the database that `open_registry` opens. Raises ConfigError."""
    return _url(config.registry.database, data_folder(config, os.environ))


def _url(setting: str, folder: pathlib.Path) -> URL:
    return database.database_url(SCHEMA, setting, folder / "registry.sqlite")
