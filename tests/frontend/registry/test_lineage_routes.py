"""OpenLineage over HTTP: what its clients send is recorded once, and a registry that is away stops nothing else."""

import httpx
import pytest
import sqlalchemy as sa

from frontends import serving
from noria.config import Config, FrontendConfig, RegistryConfig
from noria.frontend.access.api_keys import generate_key
from noria.registry.schema import lineage_events, open_registry, run_io, runs
from noria.testing.fake_engine import FakeEngine
from registry.samples import RUNS, SCENES, body, dataset

PATH = "/api/v1/lineage"


@pytest.fixture(scope="module")
def lineage_server(tmp_path_factory, folder):
    """A server whose keys are a client's of images and one's of the registry: (address, its keys, its registry)."""
    home = tmp_path_factory.mktemp("lineage")
    scopes = {"airflow": ["lineage"], "eve": ["lineage"], "operator": ["deploy"], "images": None}
    keys = {name: generate_key(name, of_key) for name, of_key in scopes.items()}
    (home / "keys.toml").write_text("".join(table for _, table in keys.values()))
    frontend = FrontendConfig(api_keys_file=str(home / "keys.toml"), max_body_bytes=65_536)
    config = Config(data_dir=str(home / "data"), frontend=frontend)
    with FakeEngine(f"ipc://{folder}/lineage") as engine, serving(config, engine) as (url, _):
        yield url, {name: key for name, (key, _) in keys.items()}, config


@pytest.fixture
def post(lineage_server):
    """Posts to the server, by default with the registry's key."""
    url, keys, _ = lineage_server
    with httpx.Client(base_url=url, timeout=60, verify=False) as client:

        def send(path, content, key="airflow", **headers):
            return client.post(path, json=content, headers={"X-Api-Key": keys[key], **headers})

        yield send


@pytest.fixture
def recorded(lineage_server):
    """Returns rows of the server's registry."""
    engine = open_registry(lineage_server[2])

    def read(*columns, run=0):
        table = columns[0].table
        with engine.connect() as connection:
            return connection.execute(sa.select(*columns).where(table.c.run_id == RUNS[run])).all()

    yield read
    engine.dispose()


def test_the_real_client_is_understood(lineage_server, recorded):
    client = pytest.importorskip("openlineage.client")
    from openlineage.client.event_v2 import InputDataset, Job, OutputDataset, Run, RunEvent, RunState
    from openlineage.client.facet_v2 import dataset_version_dataset
    from openlineage.client.transport.http import ApiKeyTokenProvider, HttpCompression, HttpConfig, HttpTransport

    url, keys, _ = lineage_server
    auth = ApiKeyTokenProvider({"apiKey": keys["airflow"]})
    senders = [
        client.OpenLineageClient(transport=HttpTransport(HttpConfig(url=url, auth=auth, compression=compression)))
        for compression in (None, HttpCompression.GZIP)
    ]
    version = {"version": dataset_version_dataset.DatasetVersionDatasetFacet(datasetVersion=SCENES)}
    for state, second in ((RunState.START, 1), (RunState.COMPLETE, 3)):
        event = RunEvent(
            eventType=state,
            eventTime=f"2026-11-22T09:00:0{second}Z",
            run=Run(RUNS[1]),
            job=Job("demo", "train"),
            producer="urn:test",
            inputs=[InputDataset("file", "/scenes", facets=version)] if state is RunState.START else [],
            outputs=[OutputDataset("noria", "models/shapes")],
        )
        for sender in senders:
            sender.emit(event)
    assert recorded(lineage_events.c.received_from, run=1) == [("airflow",)] * 2
    ((status, started_at, ended_at),) = recorded(runs.c.status, runs.c.started_at, runs.c.ended_at, run=1)
    assert (status, ended_at - started_at) == ("complete", 2)
    assert recorded(run_io.c.direction, run=1) == [("input",), ("output",)]


def test_a_batch_is_recorded_whole_or_not_at_all(post, recorded):
    events = [body(2, "START", inputs=[dataset("/scenes", SCENES)]), body(2)]
    rejected = post(f"{PATH}/batch", [*events, body(2) | {"eventTime": "noon"}])
    assert (rejected.status_code, rejected.json()["error"]["param"]) == (400, "[2].eventTime")
    assert recorded(runs.c.status, run=2) == []
    for _ in range(2):
        assert (answer := post(f"{PATH}/batch", events)).status_code == 204 and answer.content == b""
    assert recorded(runs.c.status, run=2) == [("complete",)]
    assert len(recorded(lineage_events.c.seq, run=2)) == 2


def test_an_event_is_answered_200_and_what_is_wrong_in_the_houses_form(post):
    assert (post(PATH, body(3)).status_code, post(PATH, body(3)).content) == (200, b"")
    for path, content, code in [
        (PATH, {"eventTime": "2026-11-22T09:00:00Z"}, "invalid_field"),
        (PATH, [body(3)], "invalid_field"),
        (f"{PATH}/batch", body(3), "invalid_body"),
        (f"{PATH}/batch", [7], "invalid_field"),
    ]:
        answer = post(path, content)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)


def test_another_key_rewrites_nothing_and_an_operator_strikes_out_what_it_sent(lineage_server, post):
    url, keys, _ = lineage_server

    def get(path, key="airflow", **query):
        return httpx.get(f"{url}/v1/registry/{path}", params=query, headers={"X-Api-Key": keys[key]}, verify=False)

    def run_of(number):
        nodes = get("trace", of=RUNS[number]).json()["nodes"]
        return next(node for node in nodes if node.get("run_id") == RUNS[number])

    assert post(PATH, body(5)).status_code == 200
    before = run_of(5)
    for stolen in (body(5, "FAIL", second=9, job="owned"), body(5, "OTHER")):
        answer = post(PATH, stolen, key="eve")
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "foreign_run")
        assert "belongs to 'airflow'" in answer.json()["error"]["message"]
    batch = post(f"{PATH}/batch", [body(6), body(5, "FAIL")], key="eve")
    assert batch.status_code == 403 and get("trace", of=RUNS[6]).status_code == 409
    assert run_of(5) == before and before["sender"] == "airflow"
    late = post(f"{PATH}/batch", [body(6), body(6, "FAIL") | {"eventTime": "9998-12-31T23:59:59Z"}], key="eve")
    assert (late.status_code, late.json()["error"]["param"]) == (400, "[1].eventTime")
    assert "in the future" in late.json()["error"]["message"]

    assert post(PATH, body(6, outputs=[dataset("/out", SCENES)]), key="eve").status_code == 200
    (listed,) = get("events", run=RUNS[6]).json()["data"]
    assert (listed["sender"], listed["struck_out"]) == ("eve", None)
    wrong = {"digest": listed["digest"], "why": "false origin"}
    strike = "/v1/registry/struck-events"
    for key in ("airflow", "eve", "images"):
        assert post(strike, wrong, key=key).status_code == 403
    answer = post(strike, wrong, key="operator")
    assert (answer.status_code, answer.json()) == (200, {"digests": [listed["digest"]]})
    struck_out = run_of(6)["struck_out"]
    assert (struck_out["num_events"], struck_out["last"]["by"]) == (1, "operator")
    assert get("events", run=RUNS[6]).json()["data"][0]["struck_out"]["why"] == "false origin"
    for wrong, status in (({}, 400), ({"run_id": RUNS[6], "digest": "x"}, 400), ({"run_id": RUNS[9]}, 409)):
        assert post(strike, wrong, key="operator").status_code == status


def test_a_registry_that_is_away_is_a_503_and_stops_nothing_else(new_engine):
    config = Config(registry=RegistryConfig(database="postgresql://nobody@127.0.0.1:1/none"))
    with serving(config, new_engine()) as (url, _), httpx.Client(base_url=url, timeout=60, verify=False) as client:
        answer = client.post(PATH, json=body())
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "registry_unavailable")
        assert answer.json()["error"]["retryable"] and answer.headers["retry-after"] == "5"
        assert client.get("/healthz").status_code == 200
