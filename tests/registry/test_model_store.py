"""Versions and aliases: the same content is the same version, and what happened stays."""

import concurrent.futures

import msgspec
import pytest
import sqlalchemy as sa

from databases import on_both
from noria.errors import RegistryError
from noria.registry.lineage.openlineage import DatasetRef
from noria.registry.lineage.store import LineageStore
from noria.registry.model_store import ModelStore
from noria.registry.schema import (
    dataset_versions,
    deployment_heads,
    deployments,
    endpoints,
    run_io,
    runs,
    tag_events,
    version_events,
)
from noria.storage.database import write_transaction
from registry.samples import NOW, RUNS, SCENES, at, event, folder

SCENES_REF = DatasetRef("file", "/scenes", SCENES)


@pytest.fixture
def store(engine):
    return ModelStore(engine)


@on_both
def test_the_same_content_is_the_same_version(store):
    first, was_there = store.add("shapes", folder(), at(1, "first"), alias="prod")
    assert (first.name, first.aliases, first.added, was_there) == ("shapes@1", ("prod",), at(1, "first"), False)
    again, was_there = store.add("shapes", folder(url="file:///models/copy"), at(2))
    assert (again, was_there) == (
        msgspec.structs.replace(first, urls=("file:///models/a", "file:///models/copy")),
        True,
    )
    assert store.add("shapes", folder("b"), at(3))[0].name == "shapes@2"
    assert store.add("other", folder(), at(4))[0].name == "other@1"
    assert [version.name for version in store.all_versions()] == ["other@1", "shapes@1", "shapes@2"]
    assert store.manifest(first) == folder().manifest.text


@on_both
def test_versions_that_are_added_at_once_get_numbers_of_their_own(store):
    with concurrent.futures.ThreadPoolExecutor(6) as threads:
        added = list(threads.map(lambda content: store.add("shapes", folder(content), at(1))[0], "abcabc"))
    assert sorted(version.number for version in added) == [1, 1, 2, 2, 3, 3]
    assert len({version.digest for version in added}) == 3


def test_a_version_is_found_by_number_by_alias_and_as_the_latest(store):
    for content in "ab":
        store.add("shapes", folder(content), at(1))
    store.set_alias("shapes@1", "prod", at(2))
    assert [store.get(spec).number for spec in ("shapes", "shapes@1", "shapes@prod", "shapes@2")] == [2, 1, 1, 2]
    for spec, words in {
        "shape": "no model 'shape'. Did you mean 'shapes'?",
        "shapes@3": "no version 3. Its versions are 1, 2.",
        "shapes@pord": "no alias 'pord'. Did you mean 'prod'? Its aliases are prod.",
    }.items():
        with pytest.raises(RegistryError) as caught:
            store.get(spec)
        assert words in caught.value.message


def test_the_latest_version_with_all_tags_is_found(store):
    for content in "abc":
        store.add("shapes", folder(content), at(1))
    assert store.tag("shapes@1", {"stage=prod", "lang=en"}, at(2)).tags == ("lang=en", "stage=prod")
    store.tag("shapes@2", {"stage=prod"}, at(3))
    assert [store.get(f"shapes@{tags}").number for tags in ("stage=prod", "stage=prod,lang=en")] == [2, 1]
    assert store.tag("shapes@2", {"stage=test"}, at(4)).tags == ("stage=test",)  # one value for a key
    assert store.get("shapes@stage=prod").number == 1
    assert [version.number for version in store.all_versions(tags={"stage=prod"})] == [1]
    assert store.tag("shapes@1", {"stage=prod"}, at(5), delete=True).tags == ("lang=en",)
    for spec, words in {
        "shapes@stage=prod": "no version of shapes has the tag stage=prod. Its versions have the tags",
        "shapes@stage=": "the tag 'stage=' is not allowed",
    }.items():
        with pytest.raises(RegistryError) as caught:
            store.get(spec)
        assert words in caught.value.message
    with pytest.raises(RegistryError, match=r"shapes@1 has no tag 'stage=prod'\. Its tags are lang=en"):
        store.tag("shapes@1", {"stage=prod"}, at(6), delete=True)


def test_a_tag_that_is_there_is_no_event(store, engine):
    store.add("shapes", folder(), at(1))
    for now in (2, 3):
        store.tag("shapes@1", {"stage=prod"}, at(now, "tested"))
    with engine.connect() as connection:
        events = connection.execute(sa.select(tag_events.c.key, tag_events.c.value, tag_events.c.at, tag_events.c.why))
        assert events.all() == [("stage", "prod", 2.0, "tested")]


def test_an_alias_moves_and_its_history_stays(store):
    for content in "ab":
        store.add("shapes", folder(content), at(1))
    for now, version in enumerate(("shapes@1", "shapes@2", "shapes@2"), 2):
        store.set_alias(version, "prod", at(now, "moved"))
    store.delete_alias("shapes", "prod", at(9))
    assert [(change.number, change.change.at) for change in store.alias_history("shapes")] == [
        (1, 2.0),
        (2, 3.0),
        (None, 9.0),
    ]
    with pytest.raises(RegistryError, match="no alias 'prod'"):
        store.delete_alias("shapes", "prod", at(10))


@pytest.mark.parametrize("alias", ["7", "", "a b", "x" * 65, "a@b"])
def test_an_alias_that_is_not_allowed_adds_nothing(store, alias):
    with pytest.raises(RegistryError, match="is not allowed"):
        store.add("shapes", folder(), at(1), alias=alias)
    with pytest.raises(RegistryError, match="is not allowed"):
        store.check_addition("shapes", alias, None)
    store.check_addition("shapes", "prod", None)
    assert store.all_versions() == []


@on_both
def test_a_removed_version_is_gone_from_the_lists_and_comes_back_with_its_number(engine, store):
    for content in "ab":
        store.add("shapes", folder(content), at(1))
    assert store.remove("shapes@2", at(2, "worse")).removed == at(2, "worse")
    assert [version.number for version in store.all_versions("shapes")] == [1]
    assert [version.number for version in store.all_versions("shapes", with_removed=True)] == [1, 2]
    with pytest.raises(RegistryError, match=r"removed by ann.* noria models add shapes file:///models/a"):
        store.get("shapes@2")
    back, was_there = store.add("shapes", folder("b"), at(3))
    assert (back.number, back.removed, back.added.at, was_there) == (2, None, 3.0, False)
    with engine.connect() as connection:
        types = connection.scalars(sa.select(version_events.c.type).where(version_events.c.version_id == back.id))
        assert types.all() == ["added", "removed", "added"]


@on_both
def test_a_version_that_an_alias_or_a_deployment_uses_is_not_removed(engine, store):
    version, _ = store.add("shapes", folder(), at(1), alias="prod")
    with pytest.raises(RegistryError, match="named by the alias prod"):
        store.remove("shapes@1", at(2))
    store.delete_alias("shapes", "prod", at(3))
    with write_transaction(engine) as connection:
        connection.execute(endpoints.insert().values(id=1, name="t2i"))
        of_deployment = {"endpoint_id": 1, "request_key": "k", "settings": "{}", "plan": "{}"}
        connection.execute(
            deployments.insert().values(id=1, version_id=version.id, at=4, by="ann", why="", **of_deployment)
        )
        connection.execute(
            deployment_heads.insert().values(deployment_id=1, endpoint_id=1, state="serving", row_version=1)
        )
    with pytest.raises(RegistryError, match="deployed to the endpoint t2i"):
        store.remove("shapes@1", at(5))
    with write_transaction(engine) as connection:
        connection.execute(deployment_heads.update().values(state="replaced"))
    assert store.remove("shapes@1", at(6)).removed


@on_both
def test_the_run_and_the_data_of_a_version_are_lineage(engine, store):
    def outputs(run_id):
        with engine.connect() as connection:
            joined = run_io.join(dataset_versions)
            query = sa.select(run_io.c.direction, dataset_versions.c.digest).select_from(joined)
            return set(connection.execute(query.where(run_io.c.run_id == run_id)).all())

    made = {("output", folder().manifest.digest)}
    with pytest.raises(RegistryError, match=f"no run '{RUNS[0]}'"):
        store.add("shapes", folder(), at(1), run_id=RUNS[0])
    LineageStore(engine).record([event()], "", NOW)
    store.add("shapes", folder(), at(1), run_id=RUNS[0])
    assert outputs(RUNS[0]) == made
    for now in (2, 3):  # the same command again is the same run
        store.add("shapes", folder(), at(now), inputs={SCENES_REF: None})
    with engine.connect() as connection:
        (run,) = connection.execute(sa.select(runs).where(runs.c.run_id != RUNS[0])).all()
    assert outputs(run.run_id) == made | {("input", SCENES)}
    assert (run.job_namespace, run.job_name, run.status) == ("noria", "models.add", "complete")
