"""`noria.lineage`: what a script does becomes a run of the registry, wherever its events go."""

import logging

import msgspec
import pytest
import sqlalchemy as sa

from frontends import folder, new_engine, serving  # noqa: F401 - fixtures
from noria.config import Config
from noria.errors import RegistryError
from noria.lineage import Run, version_of
from noria.registry.lineage.openlineage import DatasetRef, fold, parse_event
from noria.registry.lineage.run_events import model_ref
from noria.registry.manifest import read_manifest
from noria.registry.schema import open_registry, runs
from registry.samples import refs


@pytest.fixture
def clock():
    return iter(range(100)).__next__


@pytest.fixture
def scenes(tmp_path):
    (tmp_path / "scenes").mkdir()
    (tmp_path / "scenes" / "a").write_text("a red circle")
    return tmp_path / "scenes"


def states(file):
    """The runs of a file of events, by their jobs."""
    events = [parse_event(line) for line in file.read_bytes().splitlines()]
    by_run = {
        run_id: fold(event for event in events if event.run_id == run_id) for run_id in (e.run_id for e in events)
    }
    return {state.job.value[1]: state for state in by_run.values()}


def test_a_block_is_a_run_with_steps(tmp_path, clock, scenes):
    file, digest = tmp_path / "new" / "lineage.jsonl", read_manifest(scenes).digest
    with Run("train", to=file, inputs=[version_of(scenes)], params={"rate": 0.1}, namespace="demo", clock=clock) as run:
        with run.step("encode", inputs=["s3://bucket/words@7"]) as step:
            step.output(DatasetRef("file", "/latents", "1"))
        run.param("seed", 7)
        run.metric("loss", 1)
        run.metric("loss", 0.5)
        run.output_model("shapes", scenes)
    found = states(file)
    train, encode = found["train"], found["encode"]
    assert (train.status, train.started.at, train.ended.at) == ("complete", 0, 3)
    assert refs(train.inputs) == {DatasetRef("file", str(scenes), digest): scenes.as_uri()}
    assert list(refs(train.outputs)) == [model_ref("shapes", digest)]
    assert {name: value.value for name, value in (train.params | train.metrics).items()} == {
        "rate": "0.1",
        "seed": "7",
        "loss": 0.5,
    }
    assert (encode.parent.value, list(refs(encode.inputs))) == (run.run_id, [("s3://bucket", "words", "7")])
    assert list(refs(encode.outputs)) == [("file", "/latents", "1")]


@pytest.mark.parametrize(("error", "status"), [(ValueError("no data"), "failed"), (KeyboardInterrupt(), "aborted")])
def test_an_exception_ends_the_run_and_goes_on(tmp_path, error, status):
    with pytest.raises(type(error)), Run("train", to=tmp_path / "lineage.jsonl"):
        raise error
    state = states(tmp_path / "lineage.jsonl")["train"]
    assert state.status == status
    assert state.error.value.startswith(type(error).__name__)


def test_a_server_and_the_local_registry_record_it(tmp_path, monkeypatch, new_engine):  # noqa: F811 - a fixture
    monkeypatch.setenv("NORIA_DATA_DIR", str(tmp_path / "data"))
    config = Config(data_dir=str(tmp_path / "data"))
    with Run("here"):
        pass
    with serving(config, new_engine()) as (url, _), Run("there", to=url):
        pass
    engine = open_registry(config)
    with engine.connect() as connection:
        found = connection.execute(sa.select(runs.c.job_name, runs.c.status).order_by(runs.c.started_at)).all()
    engine.dispose()
    assert found == [("here", "complete"), ("there", "complete")]


def test_a_beginning_that_cannot_be_sent_is_an_error_and_an_end_is_kept(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("noria.lineage._RETRY_AFTER_S", 0.0)
    monkeypatch.chdir(tmp_path)
    run = Run("train", to="http://127.0.0.1:1")
    with pytest.raises(RegistryError, match=r"http://127\.0\.0\.1:1/api/v1/lineage"):
        run.__enter__()
    with caplog.at_level(logging.WARNING, "noria.lineage"):
        run.__exit__(None, None, None)
    (file,) = tmp_path.glob("noria-lineage-*.jsonl")
    assert str(file) in caplog.text
    assert msgspec.json.decode(file.read_bytes())["eventType"] == "COMPLETE"
