"""OpenLineage events, as parsed events or as JSON, and model folders that nobody wrote."""

import json

from noria.registry.changes import Change
from noria.registry.lineage.openlineage import dataset_statements, parse_event
from noria.registry.manifest import Manifest
from noria.registry.model_folder import ModelFolder

NOW = 1_795_400_000.0
"""Some hours after all events."""

MONTH_END = 1_790_000_000.0
"""The time of the registry `month_old`."""

RUNS = [f"01a2028d-9625-77a9-a141-efbbcc3a6ef{digit}" for digit in range(10)]
SCENES, WORDS, WEIGHTS = (f"sha256:{letter * 64}" for letter in "abc")


def dataset(name, version=None, uri=None, namespace="file"):
    facets = {"version": {"datasetVersion": version}} if version else {}
    facets |= {"dataSource": {"name": name, "uri": uri}} if uri else {}
    return {"namespace": namespace, "name": name} | ({"facets": facets} if facets else {})


def body(run=0, type="COMPLETE", second=0, inputs=None, outputs=None, facets=None, job="train", **more):  # noqa: A002
    return {
        "eventType": type,
        "eventTime": f"2026-11-22T09:00:{second:02}Z",
        "producer": "urn:test",
        "schemaURL": "https://openlineage.io/spec/2-0-2/OpenLineage.json#/$defs/RunEvent",
        "run": {"runId": RUNS[run], "facets": facets or {}},
        "job": {"namespace": "demo", "name": job},
        "inputs": inputs or [],
        "outputs": outputs or [],
        **more,
    }


def refs(entries):
    """The datasets of `RunState.inputs` or `outputs`, with their URIs."""
    return {ref: stated.value for ref, stated in dataset_statements(entries).items()}


def event(*args, **options):
    return parse_event(json.dumps(body(*args, **options)).encode())


def step_of(run):
    return {"parent": {"run": {"runId": RUNS[run]}, "job": {"namespace": "demo", "name": "pipeline"}}}


def at(now, why=""):
    return Change(float(now), "ann", why)


def folder(content="a", url="file:///models/a"):
    return ModelFolder(url, url, "diffusion", f"print-{content}", Manifest(f"{content * 64}  file\n", 7), [])
