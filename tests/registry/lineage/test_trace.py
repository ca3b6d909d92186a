"""Traces both ways: from a model to the data that it began with, and from data to all models that saw it."""

import json
import uuid

import msgspec
import pytest

from databases import on_both
from noria.canary.judge import JudgeSettings
from noria.canary.ramp import RampPlan
from noria.cli.registry.common import format_time
from noria.cli.registry.trace import format_graph
from noria.errors import RegistryError
from noria.images.metadata import GenerationMetadata
from noria.registry.deployments.store import DeploymentStore
from noria.registry.lineage.graph import read_lineage
from noria.registry.lineage.nodes import DatasetNode, DeploymentNode, EndpointNode, ModelNode, NodeId, RunNode
from noria.registry.lineage.openlineage import parse_event
from noria.registry.lineage.run_events import model_ref
from noria.registry.lineage.store import LineageStore
from noria.registry.lineage.trace import find_dataset, find_digest, find_endpoint, find_run, trace
from noria.registry.lineage.trace_subjects import find_image_subjects, find_subjects
from noria.registry.model_store import ModelStore
from registry.samples import NOW, RUNS, SCENES, WEIGHTS, WORDS, at, body, dataset, event, folder, step_of
from sample_registry import model_folder

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
        NOW,
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


@on_both
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


def test_inputs_of_steps_are_those_of_the_run_that_states_an_output(engine, walk):
    LineageStore(engine).record(
        [
            event(PIPELINE, outputs=[dataset("/out", SCENES)]),
            event(DRAW, inputs=[dataset("/in", "1")], facets=step_of(0)),
        ],
        "",
        NOW,
    )
    with engine.connect() as connection:
        begin, end = find_dataset(connection, "file", "/in", "1"), find_dataset(connection, "file", "/out", SCENES)
    assert walk(end, "up") == ["/out@sha256:a | made by: run 0", "run 0 | step: run 1", "run 1 | input: /in@1"]
    assert walk(begin, "down") == ["/in@1 | read by: run 1", "run 1 | part of: run 0", "run 0 | output: /out@sha256:a"]


def test_data_whose_version_is_not_stated_leads_nowhere(engine, walk):
    LineageStore(engine).record(
        [event(DRAW, outputs=[dataset("/scenes")]), event(TRAIN, inputs=[dataset("/scenes")])], "", NOW
    )
    assert walk(NodeId("run", RUNS[TRAIN]), "up") == ["run 2 | input: /scenes@"]


def test_a_circle_ends(engine, walk):
    LineageStore(engine).record(
        [event(DRAW, inputs=[dataset("/a", "1")], outputs=[dataset("/a", "1")], facets=step_of(TRAIN)),
         event(TRAIN, facets=step_of(DRAW))],
        "",
        NOW,
    )  # fmt: skip
    for direction in ("up", "down"):
        assert len(walk(NodeId("run", RUNS[DRAW]), direction)) == 4


def test_a_graph_that_is_too_large_is_cut(engine, registered):
    with engine.connect() as connection:
        graph = trace(connection, [model(registered, "shapes@2")], "up", max_nodes=3)
    assert (len(graph.nodes), graph.is_cut) == (3, True)


@pytest.mark.parametrize(
    ("name", "uri"),
    [
        ("dataset file /scenes", "/scenes"),
        ("file /scenes", "/scenes"),
        ("file//scenes", "/scenes"),
        ("/scenes", "/scenes"),
        ("file:///scenes", "/scenes"),
        (f"file:///scenes@{SCENES}", "/scenes"),
        (f"file /scenes@{SCENES}", "/scenes"),
        (f"/scenes@{SCENES}", "/scenes"),
        ("dataset file /raw@7", "/raw"),
    ],
)
def test_data_is_found_by_the_names_that_a_trace_prints(engine, registered, name, uri):
    with engine.connect() as connection:
        version = "7" if uri == "/raw" else SCENES
        assert find_subjects(connection, name, "down") == [find_dataset(connection, "file", uri, version)]


@on_both
def test_runs_models_and_deployments_are_found_by_the_names_that_a_trace_prints(engine, registered):
    store = DeploymentStore(engine)
    deployment, _ = store.deploy("t2i", "shapes@1", None, JudgeSettings(), at(2))
    store.try_lease(deployment.id, "server", 3.0, 10.0)
    store.mounted(deployment.id, "server", at(3))
    with engine.connect() as connection:
        jobs = find_subjects(connection, "run demo/train")
        assert jobs == find_subjects(connection, "demo/train") == find_subjects(connection, "train")
        assert NodeId("run", RUNS[1]) in jobs and {node.kind for node in jobs} == {"run"}
        assert find_subjects(connection, "model shapes@1") == [model(registered, "shapes@1")]
        assert find_subjects(connection, "deployment 1") == [NodeId("deployment", 1)]
        assert find_subjects(connection, "endpoint t2i") == [NodeId("endpoint", "t2i")]
        for name in ("run nothing", "dataset file /none", "deployment 9", "model none", "endpoint none", "/none@7", ""):
            with pytest.raises(RegistryError):
                find_subjects(connection, name)


@on_both
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


def test_a_trace_is_bounded_whatever_its_events_state(engine):
    """In bytes, nodes and edges: of long values, of many entries, of many runs of one model, and of dense graphs."""
    long = {"executionParameters": {"parameters": [{"key": "k" * 9000, "value": "v" * 100_000}] * 2}}
    many = {"noria_metrics": {"metrics": {f"m{number}": number for number in range(900)}}}
    loss = {"noria_metrics": {"metrics": {"loss": 1}}, "errorMessage": {"message": "e" * 100_000}}
    made = [dataset("models/shapes", WEIGHTS, namespace="noria")]
    everything = [dataset(f"/{number}", "1", "s3://" + "u" * 1900) for number in range(120)]
    events = []
    for number in range(170):
        facets = (long, many, loss)[number % 3]
        sent = body(facets=facets, inputs=everything, outputs=made)
        sent["run"]["runId"] = str(uuid.UUID(int=number))
        events.append(parse_event(json.dumps(sent).encode()))
    for first in range(0, len(events), 10):  # one call may write no more
        LineageStore(engine).record(events[first:][:10], "eve", NOW)
    with engine.connect() as connection:
        subjects = find_subjects(connection, WEIGHTS)
        graph = read_lineage(connection, subjects, 500)
        assert graph.is_cut and len(graph.nodes) > 100
        assert len(msgspec.json.encode(graph)) < 8 * 2**20
        tree = trace(connection, subjects, "up")
        assert len(tree.edges) <= 20_000
        run = next(node for node in tree.nodes if isinstance(node, RunNode) and node.metrics.keys() == {"loss"})
        assert run.is_shortened and len(run.error) == 2001 and run.metrics == {"loss": 1}
        assert read_lineage(connection, subjects, 1).is_cut


@on_both
def test_false_origins_come_after_the_first_to_arrive_whatever_time_they_state(engine, registered):
    """Runs dated 1970 came before the one that made the model, and 500 of them made it vanish from the page."""
    false = [
        body(job="false", outputs=[output("a")], facets=step_of(PIPELINE), eventTime="1970-01-01T00:00:00Z")
        | {"run": {"runId": str(uuid.UUID(int=number)), "facets": step_of(PIPELINE)}}
        for number in range(20)
    ]
    store = LineageStore(engine)
    store.record([parse_event(json.dumps(each).encode()) for each in false], "eve", NOW)
    store.record([event(7, outputs=[output("a")], facets=step_of(PIPELINE))], "bob", NOW)

    def first(subject, role):
        with engine.connect() as connection:
            graph = trace(connection, [subject], "up", 4)
        assert graph.is_cut
        found = [graph.nodes[edge.to] for edge in graph.edges if edge.role == role and edge.start == 0]
        return [(node.job_name, node.sender) for node in found]

    assert first(model(registered, "shapes@1"), "made by") == [("train", ""), ("false", "eve"), ("train", "bob")]
    assert first(NodeId("run", RUNS[PIPELINE]), "step") == [("train", ""), ("false", "eve"), ("train", "bob")]
    with engine.connect() as connection:
        graph = trace(connection, [NodeId("run", str(uuid.UUID(int=0)))], "up")
    text = "\n".join(format_graph(graph))
    assert "1970" in text and f"sent by eve, received {format_time(NOW)}" in text


SHAPES_3 = model_folder(3)


@pytest.mark.parametrize(
    ("deployment", "digest", "direction", "subject"),
    [
        (3, SHAPES_3.manifest.digest, "up", "deployment"),
        (3, SHAPES_3.manifest.digest, "down", "model"),
        (4, SHAPES_3.manifest.digest, "up", "model"),  # a deployment of another registry
        (None, None, "up", "model"),  # by its fingerprint
        (2**70, None, "up", "model"),
    ],
)
def test_an_image_leads_to_what_made_it(month_old, deployment, digest, direction, subject):
    fields = {"model_version": SHAPES_3.fingerprint, "deployment": deployment, "model_digest": digest}
    metadata = GenerationMetadata("p", model="t2i", noria="0.1.0", **fields)
    expected = {"deployment": NodeId("deployment", 3), "model": NodeId("model", SHAPES_3.manifest.digest)}
    with month_old.connect() as connection:
        assert find_image_subjects(connection, metadata, "a.png", direction) == [expected[subject]]


@pytest.mark.parametrize(
    ("noria", "words"),
    [("0.1.0", "t2i with the fingerprint unknown is not in the registry"), (None, "another program than Noria")],
)
def test_an_image_of_a_model_that_is_not_known_says_so(month_old, noria, words):
    metadata = GenerationMetadata("p", model="t2i", model_version="unknown", noria=noria)
    with month_old.connect() as connection, pytest.raises(RegistryError, match=f"^a.png: .*{words}"):
        find_image_subjects(connection, metadata, "a.png")
