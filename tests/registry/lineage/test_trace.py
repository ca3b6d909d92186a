"""Traces both ways: from a model to the data that it began with, and from data to all models that saw it."""

import pytest

from noria.canary.judge import JudgeSettings
from noria.canary.ramp import RampPlan
from noria.errors import RegistryError
from noria.registry.deployments.store import DeploymentStore
from noria.registry.lineage.run_events import model_ref
from noria.registry.lineage.store import LineageStore
from noria.registry.lineage.trace import (
    DatasetNode,
    DeploymentNode,
    EndpointNode,
    ModelNode,
    NodeId,
    RunNode,
    find_dataset,
    find_digest,
    find_endpoint,
    find_run,
    trace,
)
from noria.registry.lineage.trace_subjects import find_subjects
from noria.registry.model_store import ModelStore
from registry.samples import RUNS, SCENES, WEIGHTS, WORDS, at, dataset, event, folder, on_sqlite, step_of

PIPELINE, DRAW, TRAIN, EVALUATE, FINE_TUNE = range(5)


def name_of(node):
    match node:
        case EndpointNode():
            return f"endpoint {node.name}"
        case DeploymentNode():
            return f"deployment {node.number} ({node.state})"
        case ModelNode():
            return "+".join(node.names)
        case DatasetNode():
            return f"{node.name}@{node.version[:8]}"
        case RunNode():
            return f"run {RUNS.index(node.run_id)}"


@pytest.fixture
def walk(engine):
    """Traces; returns the edges by names, in the order in which they were found."""

    def run(subject, direction):
        with engine.connect() as connection:
            graph = trace(connection, [subject], direction)
        names = [name_of(node) for node in graph.nodes]
        return [f"{names[edge.start]} | {edge.role}: {names[edge.to]}" for edge in graph.edges]

    return run


def output(content):
    namespace, name, version = model_ref("whatever", folder(content).manifest.digest)
    return dataset(name, version, namespace=namespace)


@pytest.fixture
def registered(engine):
    """A pipeline of steps that made shapes@1, and shapes@2, which another run made from it and from words."""
    store = ModelStore(engine)
    for content in "ab":
        store.add("shapes", folder(content), at(1))
    LineageStore(engine).record(
        [
            event(PIPELINE, job="pipeline"),
            event(
                DRAW, second=1, inputs=[dataset("/raw", "7")], outputs=[dataset("/scenes", SCENES)], facets=step_of(0)
            ),
            event(TRAIN, second=2, inputs=[dataset("/scenes", SCENES)], outputs=[output("a")], facets=step_of(0)),
            event(EVALUATE, second=3, inputs=[output("a"), dataset("/test", WEIGHTS)], facets=step_of(0)),
            event(FINE_TUNE, second=4, inputs=[output("a"), dataset("/words", WORDS)], outputs=[output("b")]),
        ],
        "",
        1.0,
    )
    return store


def model(store, spec):
    return NodeId("model", store.get(spec).digest)


def test_a_model_leads_to_its_data_by_each_step(registered, walk):
    assert walk(model(registered, "shapes@2"), "up") == [
        "shapes@2 | made by: run 4",
        "run 4 | input: /words@sha256:b",
        "run 4 | input: shapes@1",
        "shapes@1 | made by: run 2",
        "run 2 | input: /scenes@sha256:a",
        "/scenes@sha256:a | made by: run 1",
        "run 1 | input: /raw@7",
    ]


def test_data_leads_to_every_model_that_saw_it_and_to_no_other(engine, registered, walk):
    with engine.connect() as connection:
        raw = find_dataset(connection, "file", "/raw", "7")
        (tested,) = find_digest(connection, WEIGHTS)
        (words,) = find_digest(connection, WORDS[:15])
    reached = {edge.rpartition(": ")[2] for edge in walk(raw, "down")}
    assert reached == {"run 0", "run 1", "run 2", "run 3", "run 4", "/scenes@sha256:a", "shapes@1", "shapes@2"}
    assert walk(tested, "down") == ["/test@sha256:c | read by: run 3", "run 3 | part of: run 0"]
    assert walk(words, "down") == ["/words@sha256:b | read by: run 4", "run 4 | output: shapes@2"]


def test_an_endpoint_leads_to_the_versions_that_get_its_requests(engine, registered, walk):
    store = DeploymentStore(engine)

    def find():
        with engine.connect() as connection:
            return find_endpoint(connection, "t2i")

    def find_text(text):
        with engine.connect() as connection:
            return find_subjects(connection, text)

    for version, plan in (("shapes@1", None), ("shapes@2", RampPlan((5.0,)))):
        deployment, _ = store.deploy("t2i", version, plan, JudgeSettings(), at(2))
        assert find() == (None if plan is None else NodeId("endpoint", "t2i"))
        if plan is None:
            with pytest.raises(RegistryError, match=r"no version .* serves the endpoint t2i now.* deployment:1\."):
                find_text("t2i")
        store.try_lease(deployment.id, "server", 3.0, 10.0)
        store.mounted(deployment.id, "server", at(3))
    assert walk(find(), "up")[:5] == [
        "endpoint t2i | serving: deployment 1 (serving)",
        "endpoint t2i | canary: deployment 2 (canary)",
        "deployment 1 (serving) | version: shapes@1",
        "deployment 2 (canary) | version: shapes@2",
        "shapes@1 | made by: run 2",
    ]
    with engine.connect() as connection:
        (words,) = find_digest(connection, WORDS)
    assert walk(words, "down")[-2:] == [
        "shapes@2 | deployed as: deployment 2 (canary)",
        "deployment 2 (canary) | serves: endpoint t2i",
    ]
    store.roll_back("t2i", at(4))
    assert walk(words, "down")[-1] == "run 4 | output: shapes@2"
    assert walk(NodeId("deployment", 2), "up")[0] == "deployment 2 (rolled_back) | version: shapes@2"


@on_sqlite
def test_inputs_of_steps_are_those_of_the_run_that_states_an_output(engine, walk):
    LineageStore(engine).record(
        [
            event(PIPELINE, outputs=[dataset("/out", SCENES)]),
            event(DRAW, inputs=[dataset("/in", "1")], facets=step_of(0)),
        ],
        "",
        1.0,
    )
    with engine.connect() as connection:
        begin, end = find_dataset(connection, "file", "/in", "1"), find_dataset(connection, "file", "/out", SCENES)
    assert walk(end, "up") == ["/out@sha256:a | made by: run 0", "run 0 | step: run 1", "run 1 | input: /in@1"]
    assert walk(begin, "down") == ["/in@1 | read by: run 1", "run 1 | part of: run 0", "run 0 | output: /out@sha256:a"]


@on_sqlite
def test_data_whose_version_is_not_stated_leads_nowhere(engine, walk):
    LineageStore(engine).record(
        [event(DRAW, outputs=[dataset("/scenes")]), event(TRAIN, inputs=[dataset("/scenes")])], "", 1.0
    )
    assert walk(NodeId("run", RUNS[TRAIN]), "up") == ["run 2 | input: /scenes@"]


@on_sqlite
def test_a_circle_ends(engine, walk):
    LineageStore(engine).record(
        [event(DRAW, inputs=[dataset("/a", "1")], outputs=[dataset("/a", "1")], facets=step_of(TRAIN)),
         event(TRAIN, facets=step_of(DRAW))],
        "",
        1.0,
    )  # fmt: skip
    for direction in ("up", "down"):
        assert len(walk(NodeId("run", RUNS[DRAW]), direction)) == 4


@on_sqlite
def test_a_graph_that_is_too_large_is_cut(engine, registered):
    with engine.connect() as connection:
        graph = trace(connection, [model(registered, "shapes@2")], "up", max_nodes=3)
    assert (len(graph.nodes), graph.is_cut) == (3, True)


def test_what_is_not_there_is_said(engine, registered):
    digest = registered.get("shapes@1").digest
    with engine.connect() as connection:
        assert find_digest(connection, digest[:20]) == [NodeId("model", digest)]
        assert find_run(connection, RUNS[0].upper()) == NodeId("run", RUNS[0])
        for find, words in [
            (lambda: find_digest(connection, "sha256:" + "0" * 64), "no model and no data with the digest"),
            (lambda: find_digest(connection, "sha256:abc"), "its first 8 to 64 digits"),
            (lambda: find_run(connection, RUNS[9]), "has no run"),
            (lambda: find_dataset(connection, "file", "/scenes", "1"), f"no version '1' .* versions are {SCENES}"),
            (lambda: find_dataset(connection, "file", "/none", "1"), "no such dataset"),
        ]:
            with pytest.raises(RegistryError, match=words):
                find()
