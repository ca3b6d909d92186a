"""MLflow's API: what Noria asks, whom it sends credentials, and what it makes of a run."""

import contextlib
import json
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec
import pytest

import noria.registry.sources.mlflow
from http_servers import HttpServer
from noria.errors import ModelError
from noria.registry.lineage.openlineage import DatasetRef, fold
from noria.registry.sources.mlflow import MlflowClient
from noria.registry.sources.mlflow_run import MlflowRun, events_of
from noria.registry.sources.read import read_source
from noria.registry.sources.source import MlflowSource
from registry.samples import refs

RUN = "01a2028d962577a9a141efbbcc3a6ef9"
ARTIFACTS = {"config.json": b"{}", "model.safetensors": b"weights"}
RUN_BODY = {
    "info": {
        "run_id": RUN,
        "experiment_id": "7",
        "status": "FINISHED",
        "start_time": 1000,
        "end_time": 61000,
        "artifact_uri": f"mlflow-artifacts:/7/{RUN}/artifacts",
    },
    "data": {
        "params": [{"key": "rate", "value": "0.001"}],
        "metrics": [{"key": "loss", "value": 0.047, "step": 3}, {"key": "gap", "value": "NaN"}],
    },
    "inputs": {
        "dataset_inputs": [
            {"dataset": {"name": "scenes", "digest": "9c5e2f1a", "source": '{"uri": "s3://bucket/scenes"}'}},
            {"dataset": {"name": "words", "digest": "00000001", "source": '{"tags": {}}'}},
            {"dataset": {"name": "local", "digest": "00000002", "source": '{"uri": "data/local.csv"}'}},
        ]
    },
}


class FakeMlflow:
    """Answers as MLflow's server does, and notes the credentials that it gets."""

    def __init__(self):
        self.uri, self.answers, self.credentials = f"runs:/{RUN}/words", {}, set()
        self._server = HttpServer(self.answer).__enter__()
        self.url = self._server.url

    def answer(self, request):
        self.credentials.add(request.headers.get("Authorization"))
        parts = urlsplit(request.path)
        path, query = unquote(parts.path), {key: found[0] for key, found in parse_qs(parts.query).items()}
        api, artifacts = "/api/2.0/mlflow/", "/api/2.0/mlflow-artifacts/artifacts"
        version = {"name": "words", "version": "3", "run_id": RUN}
        known = {
            f"{api}registered-models/alias": {"model_version": version} if query.get("alias") == "prod" else None,
            f"{api}model-versions/get": {"model_version": version},
            f"{api}model-versions/get-download-uri": {"artifact_uri": self.uri},
            f"{api}runs/get": {"run": RUN_BODY},
            f"{api}experiments/get": {"experiment": {"experiment_id": "7", "name": "train words"}},
            artifacts: {"files": [{"path": name, "file_size": len(text)} for name, text in ARTIFACTS.items()]},
        } | self.answers
        if path in known and known[path] is not None:
            answer = known[path]
            return request.send(*answer) if isinstance(answer, tuple) else request.send(answer)
        if path.startswith(f"{artifacts}/7/{RUN}/artifacts/words/"):
            return request.send(ARTIFACTS[path.rpartition("/")[2]])
        return request.send(b'{"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "Alias not found."}', 400)

    def close(self):
        self._server.__exit__()


@pytest.fixture
def mlflow():
    opened = FakeMlflow()
    yield opened
    opened.close()


def open_model(mlflow, number="3", alias=None, environment=None):
    with contextlib.closing(MlflowClient(mlflow.url, environment or {})) as server:
        folder, run = server.open(MlflowSource(mlflow.url, "words", number, alias))
        return folder, run, {file.path: b"".join(folder.read(file.path)) for file in folder.files}


@pytest.mark.parametrize(("number", "alias"), [("3", None), (None, "prod")])
@pytest.mark.parametrize("uri", [f"runs:/{RUN}/words", f"mlflow-artifacts:/7/{RUN}/artifacts/words"])
def test_a_version_is_listed_and_read_with_its_run(mlflow, uri, number, alias):
    mlflow.uri = uri
    folder, run, files = open_model(mlflow, number, alias)
    assert (folder.revision, run.experiment, files) == ("words/3", "train words", ARTIFACTS)


def test_what_the_server_rejects_is_one_sentence(mlflow):
    with pytest.raises(ModelError, match=rf"{mlflow.url} answers 400: Alias not found\. Check the name"):
        open_model(mlflow, None, "test")


def test_a_server_that_is_away_is_one_sentence():
    with (
        contextlib.closing(MlflowClient("http://127.0.0.1:1", {})) as server,
        pytest.raises(ModelError, match=r"the MLflow server http://127.0.0.1:1 does not answer: .*refused"),
    ):
        server.open(MlflowSource("http://127.0.0.1:1", "words", "3", None))


@pytest.mark.parametrize(
    ("environment", "sent"),
    [
        ({"MLFLOW_TRACKING_TOKEN": "hunter2"}, "Bearer hunter2"),
        ({"MLFLOW_TRACKING_USERNAME": "ann", "MLFLOW_TRACKING_PASSWORD": "b"}, "Basic YW5uOmI="),
        ({}, None),
    ],
)
def test_credentials_are_sent_to_the_server(mlflow, environment, sent):
    open_model(mlflow, environment=environment)
    assert mlflow.credentials == {sent}


def test_no_redirect_is_followed(mlflow):
    other = FakeMlflow()
    try:
        path = "/api/2.0/mlflow/model-versions/get"
        mlflow.answers[path] = (b"", 302, {"Location": f"{other.url}{path}"})
        with pytest.raises(ModelError, match="answers 302: no reason"):
            open_model(mlflow, environment={"MLFLOW_TRACKING_TOKEN": "hunter2"})
        assert other.credentials == set()
    finally:
        other.close()


@pytest.mark.parametrize(
    "uri",
    [
        "/var/mlflow/7",
        "file:///etc",
        "local:///etc",
        "memory://models/shapes",
        "dir::s3://bucket/7",
        "s3://bucket/7::file:///etc",
        "s3::file:///etc",
        "ftp://ann:hunter2@other.example/7",
        "sftp://other.example/7",
        "mlflow-artifacts://other.example:80/7",
        "mlflow-artifacts://[x",
    ],
)
def test_artifacts_elsewhere_than_in_an_object_store_are_rejected(mlflow, memory, uri):
    mlflow.uri = uri
    with pytest.raises(
        ModelError, match=r"keeps the artifacts of words/3 in .*(: Invalid|--serve-artifacts)|is no source"
    ) as raised:
        open_model(mlflow)
    assert "hunter2" not in str(raised.value)


def test_artifacts_in_a_store_are_read_from_the_store(mlflow, memory, monkeypatch):
    monkeypatch.setattr(noria.registry.sources.mlflow, "_STORES", ("memory",))
    mlflow.uri = "memory://models/shapes"
    folder, _, files = open_model(mlflow)
    assert "unet/config.json" in files and folder.revision == "words/3"


@pytest.mark.parametrize("answer", [{"model_version": {"name": 7}}, {}, (b"<html>", 200)])
def test_a_server_that_is_no_mlflow_is_one_sentence(mlflow, answer):
    mlflow.answers["/api/2.0/mlflow/model-versions/get"] = answer
    with pytest.raises(ModelError, match="does not answer as MLflow does"):
        open_model(mlflow)


def test_a_run_becomes_a_run_of_the_registry():
    run = msgspec.structs.replace(msgspec.convert(RUN_BODY, MlflowRun), experiment="train words")
    model = DatasetRef("noria", "models/words", f"sha256:{'c' * 64}")
    events = events_of(run, "http://mlflow", model, "file:///models/words")
    assert [event.digest for event in events] == [
        event.digest for event in events_of(run, "http://mlflow", model, "file:///models/words")
    ]
    state = fold(events)
    assert {event.run_id for event in events} == {"01a2028d-9625-77a9-a141-efbbcc3a6ef9"}
    assert state.job.value == ["http://mlflow", "train words"]
    assert (state.status, state.started.at, state.ended.at) == ("complete", 1.0, 61.0)
    assert {name: stated.value for name, stated in state.params.items()} == {"rate": "0.001"}
    assert {name: stated.value for name, stated in state.metrics.items()} == {"loss": 0.047}
    assert refs(state.inputs) == {
        DatasetRef("s3://bucket", "scenes", "mlflow-9c5e2f1a"): "s3://bucket/scenes",
        DatasetRef("http://mlflow", "words", "mlflow-00000001"): None,
        DatasetRef("http://mlflow", "local", "mlflow-00000002"): None,
    }
    assert refs(state.outputs) == {model: "file:///models/words"}


@pytest.mark.parametrize(
    ("url", "ref"),
    [
        ("https://bucket.s3.amazonaws.com/a.csv?X-Amz-Signature=hunter2", ("https://bucket.s3.amazonaws.com", "a.csv")),
        ("https://host/a.csv#token=hunter2", ("https://host", "a.csv")),
        ("postgresql://ann:hunter2@db:5432/scenes", ("postgresql://db:5432", "scenes")),
        ("s3://hunter2@bucket/a@b.csv", ("s3://bucket", "a@b.csv")),
        ("https://host/token=hunter2/a.csv", ("http://mlflow", "scenes")),
        ("http://[::1/hunter2", ("http://mlflow", "scenes")),
    ],
)
def test_no_secret_in_the_url_of_a_dataset_becomes_lineage(url, ref):
    dataset = {"name": "scenes", "digest": "1", "source": json.dumps({"url": url})}
    run = msgspec.convert(RUN_BODY | {"inputs": {"dataset_inputs": [{"dataset": dataset}]}}, MlflowRun)
    run = msgspec.structs.replace(run, experiment="e")
    events = events_of(run, "http://mlflow", DatasetRef("n", "m", ""), "u")
    assert [each[:2] for each in refs(fold(events).inputs)] == [ref]
    assert "hunter2" not in "".join(event.body for event in events)


def dataset_input(number):
    return {"dataset": {"name": f"scenes {number}", "digest": "1", "source": "{}"}}


@pytest.mark.parametrize(
    ("run", "experiment"),
    [
        ({"info": RUN_BODY["info"] | {"start_time": 10**18}}, "e"),
        ({"info": RUN_BODY["info"] | {"end_time": 10**60}}, "e"),
        ({"info": RUN_BODY["info"] | {"run_id": "zz"}}, "e"),
        ({"inputs": {"dataset_inputs": [dataset_input(number) for number in range(1001)]}}, "e"),
        ({}, ""),
    ],
)
def test_a_run_that_cannot_be_recorded_is_one_sentence_before_anything_is_copied(mlflow, tmp_path, run, experiment):
    api = "/api/2.0/mlflow/"
    mlflow.answers |= {
        f"{api}runs/get": {"run": RUN_BODY | run},
        f"{api}experiments/get": {"experiment": {"name": experiment}},
    }
    with pytest.raises(
        ModelError, match=r"the run '\w+' of the MLflow server http://127.0.0.1:\d+ cannot be recorded"
    ) as raised:
        read_source("mlflow:models:/words/3", "words", tmp_path, {"MLFLOW_TRACKING_URI": mlflow.url}, print)
    assert "\n" not in str(raised.value) and not list(tmp_path.iterdir())


def test_a_run_that_goes_on_is_running():
    run = msgspec.convert(RUN_BODY | {"info": RUN_BODY["info"] | {"status": "RUNNING", "end_time": 0}}, MlflowRun)
    state = fold(
        events_of(msgspec.structs.replace(run, experiment="e"), "http://mlflow", DatasetRef("n", "m", ""), "u")
    )
    assert state.status == "running"
