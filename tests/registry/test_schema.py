"""The registry's tables, on SQLite and PostgreSQL: history stays, and an endpoint has one deployment at once."""

import dataclasses

import msgspec
import pytest
import sqlalchemy as sa
from sqlalchemy import MetaData
from sqlalchemy.exc import DBAPIError, IntegrityError

from databases import check_tables
from noria.config import Config, RegistryConfig
from noria.registry import schema
from noria.registry.check import check
from noria.registry.lineage.nodes import NodeId, describe
from noria.registry.lineage.openlineage import fold
from noria.registry.lineage.run_rows import run_row
from noria.registry.model_store import ModelStore
from noria.storage.append_only import make_append_only
from noria.storage.database import database_url, insert_if_new, open_database, write_transaction
from registry.samples import NOW, RUNS, SCENES, at, dataset, event, folder


@pytest.fixture
def deployed(engine):
    """A model version, deployed twice to one endpoint, and once in every other table."""
    text = {"at": 1.0, "by": "ann", "why": ""}
    rows = [
        (schema.datasets, {"id": 1, "namespace": "file", "name": "/scenes", "key": "d"}),
        (schema.dataset_versions, {"id": 1, "dataset_id": 1, "version": "7", "key": "v"}),
        (
            schema.lineage_events,
            {"digest": "sha256:e", "at": 1.0, "received_at": 2.0, "received_from": "ann", "body": "{}"},
        ),
        (schema.struck_events, {"event_seq": 1, **text}),
        (schema.artifacts, {"digest": "sha256:m", "size_bytes": 3, "manifest": "…"}),
        (schema.models, {"id": 1, "name": "shapes"}),
        (
            schema.versions,
            {
                "id": 1,
                "model_id": 1,
                "number": 1,
                "manifest_digest": "sha256:m",
                "code_digest": "",
                "kind": "diffusion",
                "fingerprint": "f",
                "source": "bundled",
            },
        ),
        (schema.version_events, {"version_id": 1, "type": "added", **text}),
        (schema.alias_events, {"model_id": 1, "alias": "prod", "version_id": 1, **text}),
        (schema.tag_events, {"version_id": 1, "key": "stage", "value": "prod", **text}),
        (schema.endpoints, {"id": 1, "name": "t2i"}),
        *[
            (
                schema.deployments,
                {
                    "id": number,
                    "endpoint_id": 1,
                    "request_key": str(number),
                    "version_id": 1,
                    "settings": "{}",
                    "plan": "{}",
                    **text,
                },
            )
            for number in (1, 2)
        ],
        (schema.deployment_events, {"deployment_id": 1, "number": 1, "type": "began", **text}),
        (schema.routes, {"generation": 1, "routes": "{}", "at": 1.0}),
        (schema.baselines, {"version_id": 1, "endpoint": "t2i", "variable": "tokens", "counts": "{}", **text}),
    ]
    with write_transaction(engine) as connection:
        for table, values in rows:
            connection.execute(table.insert().values(values))
    return engine


@pytest.mark.parametrize("change", ["update", "delete"])
def test_history_is_append_only(deployed, change):
    for table in schema.HISTORY:
        statement = (
            sa.delete(table) if change == "delete" else sa.update(table).values({list(table.columns)[-1].name: "0"})
        )
        with pytest.raises(DBAPIError, match="is append-only"), write_transaction(deployed) as connection:
            connection.execute(statement)


def test_an_endpoint_has_one_unfinished_deployment(deployed):
    def start(deployment):
        with write_transaction(deployed) as connection:
            connection.execute(
                schema.deployment_heads.insert().values(
                    deployment_id=deployment, endpoint_id=1, state="loading", row_version=1
                )
            )

    start(1)
    with pytest.raises(IntegrityError):
        start(2)
    with write_transaction(deployed) as connection:
        connection.execute(schema.deployment_heads.update().values(finished_at=9.0))
    start(2)


def old_tables(version):
    """The tables of an earlier version."""
    found = MetaData()
    newer = {1: {"noria_tag_events"}}.get(version, set()) | {table.name for table in NEW_IN_3}
    for table in schema.metadata.sorted_tables:
        if table.name not in newer:
            copied = table.to_metadata(found)
            for column in NEW_COLUMNS_IN_3.get(table.name, ()):
                copied._columns.remove(copied.c[column])
    make_append_only(found, *(found.tables[table.name] for table in schema.HISTORY if table.name in found.tables))
    return dataclasses.replace(schema.SCHEMA, metadata=found, migrations=schema.SCHEMA.migrations[: version - 1])


NEW_IN_3 = (schema.run_entries, schema.struck_events, schema.lineage_senders)
NEW_COLUMNS_IN_3 = {"noria_runs": ("owner", "num_events", "num_bytes"), "noria_run_io": ("at", "digest")}


@pytest.mark.parametrize("version", [1, 2])
def test_a_registry_of_an_earlier_version_is_migrated(database, tmp_path, version):
    old = old_tables(version)
    url = database_url(old, database, tmp_path / "registry.sqlite")
    open_database(old, url, 1).dispose()
    engine = schema.open_registry_database(database, tmp_path)
    check_tables(engine, schema.metadata)
    store = ModelStore(engine)
    store.add("shapes", folder(), at(1))
    assert store.tag("shapes", {"stage=prod"}, at(2)).tags == ("stage=prod",)
    with pytest.raises(DBAPIError, match="is append-only"), write_transaction(engine) as connection:
        connection.execute(sa.delete(schema.tag_events))
    engine.dispose()


def test_runs_of_an_earlier_version_have_their_rows_and_belong_to_who_sent_their_first_event(database, tmp_path):
    old = old_tables(2)
    url = database_url(old, database, tmp_path / "registry.sqlite")
    params = {"executionParameters": {"parameters": [{"key": "rate", "value": "1e-3"}]}}
    events = [event(type="START", inputs=[dataset("/scenes", SCENES, "s3://b")], facets=params), event(second=1)]
    engine = open_database(old, url, 1)
    with write_transaction(engine) as connection:
        for number, each in enumerate(events):
            values = {
                "digest": each.digest,
                "run_id": each.run_id,
                "at": each.at,
                "received_at": NOW,
                "body": each.body,
            }
            sender = ("ann", "eve")[number]
            connection.execute(
                old.metadata.tables["noria_lineage_events"].insert().values(received_from=sender, **values)
            )
        row = {**run_row(fold(events)), "state": msgspec.json.encode(fold(events)).decode(), "run_id": RUNS[0]}
        connection.execute(old.metadata.tables["noria_runs"].insert().values(row))
    engine.dispose()
    engine = schema.open_registry_database(database, tmp_path)
    assert list(check(engine)) == []
    with engine.connect() as connection:
        node = describe(connection, NodeId("run", RUNS[0]))
        counted = connection.execute(sa.select(schema.runs.c.num_events, schema.runs.c.num_bytes)).one()
        senders = dict(connection.execute(sa.select(schema.lineage_senders)).all())
    assert (node.sender, node.params, node.status) == ("ann", {"rate": "1e-3"}, "complete")
    lengths = [len(each.body) for each in events]
    assert counted == (2, sum(lengths)) and senders == dict(zip(("ann", "eve"), lengths, strict=True))
    engine.dispose()


def test_a_row_must_refer_to_an_existing_one(engine):
    with pytest.raises(IntegrityError), write_transaction(engine) as connection:
        connection.execute(schema.dataset_versions.insert().values(dataset_id=99, version="1", key="v"))


def test_a_row_with_a_known_key_is_not_inserted(engine):
    with write_transaction(engine) as connection:
        assert [insert_if_new(connection, schema.models, name=name) for name in ("a", "a", "b")] == [True, False, True]


def test_by_default_the_registry_is_a_file_in_the_data_folder(tmp_path):
    schema.open_registry(Config(data_dir=str(tmp_path / "new"))).dispose()
    assert (tmp_path / "new" / "registry.sqlite").exists()
    with pytest.raises(schema.database.ConfigError, match=r"registry\.database .* in-memory"):
        schema.open_registry(Config(registry=RegistryConfig(database="sqlite://")))
