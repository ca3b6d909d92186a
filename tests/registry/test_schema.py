"""The registry's tables, on SQLite and PostgreSQL: history stays, and an endpoint has one deployment at once."""

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, IntegrityError

from databases import on_both
from noria.config import Config, RegistryConfig
from noria.registry import schema
from noria.storage.database import insert_if_new, write_transaction


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


@on_both
@pytest.mark.parametrize("change", ["update", "delete"])
def test_history_is_append_only(deployed, change):
    for table in schema.HISTORY:
        statement = (
            sa.delete(table) if change == "delete" else sa.update(table).values({list(table.columns)[-1].name: "0"})
        )
        with pytest.raises(DBAPIError, match="is append-only"), write_transaction(deployed) as connection:
            connection.execute(statement)


@on_both
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


@on_both
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
