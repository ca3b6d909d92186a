"""A trace as OpenLineage's events: another registry that reads them knows the same."""

import json

from noria.canary.judge import JudgeSettings
from noria.registry.changes import Change
from noria.registry.deployments.store import DeploymentStore
from noria.registry.lineage.export import export_events
from noria.registry.lineage.nodes import DatasetNode, NodeId, RunNode
from noria.registry.lineage.openlineage import fold, parse_event
from noria.registry.lineage.store import LineageStore
from noria.registry.lineage.trace import find_digest, find_endpoint, find_run, trace
from noria.registry.schema import open_registry_database
from registry.samples import MONTH_END as NOW


def of_kind(kind, graph):
    return {
        (node.run_id if kind is RunNode else (node.name, node.version)) for node in graph.nodes if type(node) is kind
    }


def test_another_registry_knows_the_same_runs_and_data(month_old, tmp_path):
    with month_old.connect() as connection:
        graph = trace(connection, [find_endpoint(connection, "t2i")], "up")
        lines = list(export_events(connection, graph))
        assert list(export_events(connection, graph)) == lines
    other = open_registry_database("auto", tmp_path / "other")
    assert LineageStore(other).record([parse_event(line.encode()) for line in lines], "export", NOW) == len(lines)
    with other.connect() as connection:
        deployed = [json.loads(line) for line in lines if json.loads(line)["job"]["name"] == "deploy.t2i"]
        run_ids = {each["run"]["runId"] for each in deployed}
        copied = trace(connection, [find_run(connection, run_id) for run_id in run_ids], "up")
    assert of_kind(DatasetNode, graph) < of_kind(DatasetNode, copied)  # there a model is data that nobody added
    assert of_kind(RunNode, copied) == of_kind(RunNode, graph) | run_ids
    other.dispose()


def test_deployments_are_runs_from_a_version_to_an_endpoint(month_old):
    store = DeploymentStore(month_old)
    with month_old.connect() as connection:
        graph = trace(connection, [find_endpoint(connection, "t2i")], "up")
        events = [json.loads(line) for line in export_events(connection, graph)]
        digest = connection.exec_driver_sql(
            "SELECT manifest_digest FROM noria_versions JOIN noria_models ON model_id = noria_models.id "
            "WHERE name = 'minilm'"
        ).scalar_one()
        down = list(export_events(connection, trace(connection, find_digest(connection, digest), "down")))
    _, control, *_ = deployed = [each for each in events if each["job"]["name"] == "deploy.t2i"]
    assert [each["eventType"] for each in deployed] == ["START", "COMPLETE", "START", "RUNNING"]
    assert control["inputs"][0]["name"] == "models/shapes"
    assert control["outputs"][0]["name"] == "endpoints/t2i"
    of_model, _ = [json.loads(line) for line in down]
    assert of_model["inputs"][0]["facets"]["version"]["datasetVersion"] == digest
    failed, _ = store.deploy("vectors", "minilm@1", None, JudgeSettings(), Change(NOW, "ann", "again"))
    store.try_lease(failed.id, "r", NOW, 10.0)
    store.fail(failed.id, "r", Change(NOW + 1.0, "r", "broken"))
    with month_old.connect() as connection:
        lines = list(export_events(connection, trace(connection, [NodeId("deployment", failed.id)], "up")))
    state = fold(parse_event(line.encode()) for line in lines)
    assert (state.status, state.started.at, state.ended.at) == ("failed", NOW, NOW + 1.0)
    wanted, _ = store.deploy("vectors", "minilm@1", None, JudgeSettings(), Change(NOW, "ann", "once more"))
    with month_old.connect() as connection:
        (line,) = export_events(connection, trace(connection, [NodeId("deployment", wanted.id)], "up"))
    assert json.loads(line)["eventType"] == "START"
