"""Backup, restore and check, on SQLite and PostgreSQL: all or nothing, and damage is noticed."""

import contextlib
import sqlite3

import pytest
import sqlalchemy as sa

from databases import on_both
from noria.canary.judge import JudgeSettings, JudgeState
from noria.canary.ramp import RampPlan, RampState
from noria.errors import RegistryError
from noria.registry.backup import backup, restore
from noria.registry.check import check
from noria.registry.deployments.store import DeploymentStore
from noria.registry.lineage.openlineage import DatasetRef
from noria.registry.lineage.store import LineageStore
from noria.registry.model_store import ModelStore
from noria.registry.schema import (
    aliases,
    deployment_events,
    deployment_heads,
    metadata,
    open_registry_database,
    routes,
    run_io,
    runs,
)
from noria.storage.database import write_transaction
from registry.samples import NOW, RUNS, SCENES, at, dataset, event, folder, step_of


@pytest.fixture
def filled(engine):
    """A registry with models, aliases and lineage."""
    store = ModelStore(engine)
    for content in "ab":
        store.add("shapes", folder(content, "s3://bucket/model"), at(1), alias="prod")
    store.remove("shapes@1", at(2))
    store.add("shapes", folder("c"), at(3), inputs={DatasetRef("file", "/scenes", SCENES): None})
    LineageStore(engine).record([event(0), event(1, "FAIL", inputs=[dataset("/raw", "7")], facets=step_of(0))], "", NOW)
    return engine


def rows(engine):
    with engine.connect() as connection:
        return {
            table.name: connection.execute(sa.select(table).order_by(*table.primary_key)).all()
            for table in metadata.sorted_tables
        }


@pytest.fixture
def deployed(filled):
    """Also shapes@2, which serves t2i, with shapes@3 beside it."""
    store = DeploymentStore(filled)
    for version, plan in (("shapes@2", None), ("shapes@3", RampPlan((5.0, 100.0)))):
        deployment, _ = store.deploy("t2i", version, plan, JudgeSettings(), at(4))
        assert store.try_lease(deployment.id, "server", 5.0, 10.0)
        store.mounted(deployment.id, "server", at(5))
    store.step(deployment.id, "server", RampState("waiting", 0, 600.0, 9.0), JudgeState(9, 90, 1), at(6))
    return filled


@pytest.fixture
def empty(tmp_path):
    """Another registry, in SQLite."""
    opened = open_registry_database(f"sqlite:///{tmp_path}/empty.sqlite", tmp_path)
    yield opened
    opened.dispose()


@on_both
def test_a_backup_is_restored_into_any_database(filled, empty, tmp_path):
    file = tmp_path / "backup.jsonl"
    num_rows = backup(filled, file, 5.0)
    assert (restore(empty, file), rows(empty)) == (num_rows, rows(filled))
    assert file.stat().st_mode & 0o777 == 0o600
    assert list(check(empty, with_files=False)) == []
    for engine in (filled, empty):  # numbers go on where they were
        assert ModelStore(engine).add("shapes", folder("d"), at(6))[0].name == "shapes@4"
    with pytest.raises(RegistryError, match="not empty"):
        restore(empty, file)


@pytest.mark.parametrize("database", ["postgresql"], indirect=True)
def test_numbers_go_on_after_a_restore_into_postgresql(filled, tmp_path):
    backup(filled, tmp_path / "backup", 5.0)
    with filled.connect() as connection:
        before = connection.scalar(sa.select(sa.func.max(metadata.tables["noria_version_events"].c.seq)))
    with filled.begin() as connection:
        connection.execute(sa.text("SET LOCAL session_replication_role = replica"))  # no triggers
        for table in metadata.sorted_tables:
            connection.execute(sa.text(f"TRUNCATE {table.name} RESTART IDENTITY CASCADE"))
    restore(filled, tmp_path / "backup")
    ModelStore(filled).add("shapes", folder("d"), at(6))
    with filled.connect() as connection:
        assert connection.scalar(sa.select(sa.func.max(metadata.tables["noria_version_events"].c.seq))) == before + 1


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda text: text[:-80], "is cut off"),
        (lambda text: text.replace(b"shapes", b"shaper", 1), "is damaged"),
        (lambda text: b"\n".join(text.split(b"\n")[:-3] + text.split(b"\n")[-2:]), "is damaged"),
        (lambda text: text.replace(b'"registry_version":1', b'"registry_version":9', 1), "tables of version 9"),
        (lambda text: b"", "is no backup"),
    ],
)
def test_a_damaged_backup_restores_nothing(empty, tmp_path, spoil, words):
    source = open_registry_database(f"sqlite:///{tmp_path}/source.sqlite", tmp_path)
    ModelStore(source).add("shapes", folder(), at(1))
    backup(source, tmp_path / "backup", 5.0)
    (tmp_path / "spoilt").write_bytes(spoil((tmp_path / "backup").read_bytes()))
    with pytest.raises(RegistryError, match=words):
        restore(empty, tmp_path / "spoilt")
    assert not any(rows(empty).values())
    with pytest.raises(RegistryError, match="exists already"):
        backup(source, tmp_path / "backup", 5.0)
    with pytest.raises(RegistryError, match="cannot be written"):
        backup(source, tmp_path / "no" / "folder", 5.0)
    source.dispose()


@on_both
def test_check_finds_what_does_not_follow_from_history(filled):
    assert list(check(filled, with_files=False)) == []
    with write_transaction(filled) as connection:
        connection.execute(runs.update().where(runs.c.run_id == RUNS[0]).values(status="failed"))
        connection.execute(run_io.delete().where(run_io.c.run_id == RUNS[1]))
        connection.execute(aliases.delete())
    assert list(check(filled, with_files=False)) == [
        f"run {RUNS[0]}: status is not what its events say.",
        f"run {RUNS[1]}: its inputs and outputs are not what its events say.",
        "the alias prod of model 1 names another version than its last event.",
    ]


@on_both
def test_deployments_are_restored_and_go_on(deployed, empty, tmp_path):
    backup(deployed, tmp_path / "backup", 7.0)
    restore(empty, tmp_path / "backup")
    assert rows(empty) == rows(deployed)
    assert list(check(empty, with_files=False)) == []
    for engine in (deployed, empty):
        store = DeploymentStore(engine)
        assert store.get("t2i").unfinished.evidence == JudgeState(9, 90, 1)
        assert store.promote("t2i", at(8)).state == "serving"
        assert store.roll_back("t2i", at(9)).id == 3
    assert DeploymentStore(empty).routes() == DeploymentStore(deployed).routes()


@on_both
def test_check_finds_states_and_routes_that_do_not_follow(deployed):
    ModelStore(deployed).add("shapes", folder("c", "file:///another/place"), at(7))  # it changes no route
    assert list(check(deployed, with_files=False)) == []
    with write_transaction(deployed) as connection:
        connection.execute(routes.insert().values(generation=9, routes="[]", at=7.0))
    assert list(check(deployed, with_files=False)) == [
        "the routes of generation 9 are not what the states of deployments say."
    ]
    heads = deployment_heads
    with write_transaction(deployed) as connection:
        connection.execute(heads.update().where(heads.c.deployment_id == 1).values(state="replaced"))
        connection.execute(heads.update().where(heads.c.deployment_id == 2).values(finished_at=8.0))
    assert list(check(deployed, with_files=False)) == [
        "deployment 1 of t2i is replaced, finished; its last event says that it is serving.",
        "deployment 2 of t2i is canary, finished; its last event says that it is canary.",
    ]
    with write_transaction(deployed) as connection:
        connection.execute(heads.delete().where(heads.c.deployment_id == 2))
        values = {"deployment_id": 1, "number": 9, "type": "replaced", "traffic": 0.0, "at": 9.0, "by": "", "why": ""}
        connection.execute(deployment_events.insert().values(values))
    assert list(check(deployed, with_files=False)) == ["deployment 2 of t2i has no state."]


def test_check_finds_a_damaged_page(tmp_path):
    open_registry_database("auto", tmp_path).dispose()
    file = tmp_path / "registry.sqlite"
    with contextlib.closing(sqlite3.connect(file)) as connection:
        ((page, size),) = connection.execute(
            "SELECT rootpage, page_size FROM sqlite_master, pragma_page_size WHERE name = 'noria_baselines'"
        )
    content = bytearray(file.read_bytes())
    content[(page - 1) * size : page * size] = bytes(size)
    file.write_bytes(content)
    damaged = open_registry_database("auto", tmp_path)
    (finding,) = check(damaged)
    assert finding.startswith("the database is damaged: ")
    damaged.dispose()
