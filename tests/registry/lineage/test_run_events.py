"""Events that Noria makes, by what reads them; OpenLineage's own client checks types and formats of what it reads."""

import json

import pytest

from noria.errors import RegistryError
from noria.registry.lineage.openlineage import DatasetRef, fold, parse_event
from noria.registry.lineage.run_events import RunId, as_lines, dataset_ref, model_ref, parse_dataset, run_event
from registry.samples import RUNS, SCENES, refs

TRAIN, PIPELINE = RunId(RUNS[1], "demo", "train"), RunId(RUNS[0], "demo", "pipeline")
WORDS, MODEL = DatasetRef("file", "/words", "7"), model_ref("shapes", SCENES)


@pytest.fixture
def lines():
    """The lines of the two events of a run."""
    start = run_event("START", 0.0, TRAIN, parent=PIPELINE, inputs={WORDS: "file:///words"}, params={"a": "1", "b": 2})
    end = run_event("FAIL", 60.0, TRAIN, outputs={MODEL: None}, metrics={"loss": 0.5}, error="no data")
    return as_lines([start, end]).splitlines(keepends=True)


def test_what_was_said_of_a_run_is_read_again(lines):
    state = fold(parse_event(line) for line in lines)
    assert (state.job.value[1], state.status, state.parent.value) == ("train", "failed", PIPELINE.run_id)
    assert (state.started.at, state.ended.at, state.error.value) == (0.0, 60.0, "no data")
    assert (refs(state.inputs), refs(state.outputs)) == ({WORDS: "file:///words"}, {MODEL: None})
    assert {name: each.value for name, each in (state.params | state.metrics).items()} == {
        "a": "1",
        "b": "2",
        "loss": 0.5,
    }


def test_each_line_is_an_event_whose_facets_have_what_all_must_have(lines):
    assert [line[-2:] for line in lines] == [b"}\n"] * 2
    for event in map(json.loads, lines):
        assert event["producer"] and event["schemaURL"].endswith("#/$defs/RunEvent")
        datasets = [*event["inputs"], *event["outputs"]]
        facets = event["run"]["facets"] | {name: facet for each in datasets for name, facet in each["facets"].items()}
        assert all(facet["_producer"] == event["producer"] for facet in facets.values())
        urls = {
            name: facet["_schemaURL"].removeprefix("https://openlineage.io/spec/") for name, facet in facets.items()
        }
        assert urls["version"] == "facets/1-0-1/DatasetVersionDatasetFacet.json#/$defs/DatasetVersionDatasetFacet"
        assert all(url.endswith(("Facet", "#/$defs/RunFacet")) for url in urls.values())
    assert set(urls) == {"noria_metrics", "errorMessage", "version", "datasetType"}


@pytest.mark.parametrize(
    ("text", "ref", "uri"),
    [
        ("s3://bucket/a/b@7", ("s3://bucket", "a/b", "7"), "s3://bucket/a/b"),
        ("s3://bucket@7", ("s3://bucket", "/", "7"), "s3://bucket"),
        ("/data/a b@1", ("file", "/data/a%20b", "1"), "file:///data/a%20b"),
        ("file:///a@b@1", ("file", "/a@b", "1"), "file:///a@b"),
    ],
)
def test_data_is_named_by_its_store_and_its_path_there(text, ref, uri):
    assert parse_dataset(text) == (ref, uri)
    assert dataset_ref(uri) == ((*ref[:2], ""), uri)


@pytest.mark.parametrize("text", ["file:///scenes", "file:///scenes@", "@7"])
def test_data_without_a_version_or_a_place_is_rejected(text):
    with pytest.raises(RegistryError, match=r"has no version; allowed is URI@VERSION"):
        parse_dataset(text)
