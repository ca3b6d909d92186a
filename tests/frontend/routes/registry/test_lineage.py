"""OpenLineage over HTTP: what its clients send is recorded once, and a registry that is away stops nothing else."""

import httpx
import pytest
import sqlalchemy as sa

from frontends import serving
from noria.config import Config, FrontendConfig, RegistryConfig
from noria.frontend.access.api_keys import generate_key
from noria.registry.schema import lineage_events, open_registry, runs
from noria.testing.fake_engine import FakeEngine
from registry.samples import RUNS, SCENES, body, dataset

PATH = "/api/v1/lineage"


@pytest.fixture(scope="module")
def lineage_server(tmp_path_factory, folder):
    """A server whose keys are a client's of images and one's of the registry: (address, its keys, its registry)."""
    home = tmp_path_factory.mktemp("lineage")
    keys = dict(
        zip(("images", "airflow"), (generate_key("images"), generate_key("airflow", ["registry"])), strict=True)
    )
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
    from openlineage.client.transport.http import ApiKeyTokenProvider, HttpConfig, HttpTransport

    url, keys, _ = lineage_server
    auth = ApiKeyTokenProvider({"apiKey": keys["airflow"]})
    sender = client.OpenLineageClient(transport=HttpTransport(HttpConfig(url=url, auth=auth)))
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
        for _ in range(2):
            sender.emit(event)
    assert recorded(lineage_events.c.received_from, run=1) == [("airflow",)] * 2
    ((status, started_at, ended_at, state),) = recorded(
        runs.c.status, runs.c.started_at, runs.c.ended_at, runs.c.state, run=1
    )
    assert (status, ended_at - started_at) == ("complete", 2)
    assert SCENES in state


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
    compressed = post(PATH, body(3), **{"Content-Encoding": "gzip"})
    assert (compressed.status_code, compressed.json()["error"]["code"]) == (415, "unsupported_media_type")


def test_a_key_needs_the_scope_of_the_registry(post):
    answer = post(PATH, body(4), key="images")
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "missing_scope")


def test_a_registry_that_is_away_is_a_503_and_stops_nothing_else(new_engine):
    config = Config(registry=RegistryConfig(database="postgresql://nobody@127.0.0.1:1/none"))
    with serving(config, new_engine()) as (url, _), httpx.Client(base_url=url, timeout=60, verify=False) as client:
        answer = client.post(PATH, json=body())
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "registry_unavailable")
        assert answer.json()["error"]["retryable"] and answer.headers["retry-after"] == "5"
        assert client.get("/healthz").status_code == 200
