"""Encoders come and go in a running engine: fake sessions behind a real channel, and a real encoder's load."""

import shutil
import threading
import weakref

import msgspec
import numpy as np
import pytest

from encoders import make_encoder, open_exported, sentence_transformer
from noria.config import EngineConfig
from noria.engine.encoder.loading import load_runtime, make_runtime
from noria.engine.engines import BatchEngine
from noria.errors import ModelError
from noria.models.catalog import open_model
from noria.protocol.messages import Cancel, Finished, Hello, ModelPrecision, Mount, MountResult, Unmount
from noria.testing.fake_encoder import FAKE_ENCODER, FakeSession, make_text_request
from running_engine import RunningEngine
from waiting import TIMEOUT_S

NEWER = msgspec.structs.replace(FAKE_ENCODER, fingerprint="newer0000000")


class Harness(RunningEngine):
    """An engine with two sessions of FAKE_ENCODER, and a client."""

    def __init__(self, folder):
        super().__init__(folder, [FAKE_ENCODER])
        self.go_on, self.began, self.newer = threading.Event(), threading.Event(), []
        sessions = [FakeSession(self.on_batch) for _ in range(2)]
        self.runtime = make_runtime({FAKE_ENCODER: sessions}, EngineConfig(), "cpu", self.load)
        self.start(self.runtime, BatchEngine)
        self.client = self.connect()
        self.client.send(Hello("client"))
        self.client.receive()

    def load(self, spec, num_sessions):
        sessions = [FakeSession(self.on_batch, spec) for _ in range(num_sessions)]
        self.newer = [weakref.ref(each) for each in sessions]
        return sessions

    def on_batch(self, rows):
        """Token 500 waits until `go_on` is set."""
        if any(500 in row.ids for row in rows):
            self.began.set()
            assert self.go_on.wait(TIMEOUT_S)

    def close(self):
        self.go_on.set()
        super().close()
        self.runtime.executor.close()


@pytest.fixture
def harness(tmp_path):
    made = Harness(tmp_path)
    yield made
    made.close()


def request(name, *ids, spec=NEWER):
    return make_text_request(name, ids, model=spec, model_version=spec.fingerprint)


def test_a_second_version_serves_beside_the_first_and_is_released_after_its_last_batch(harness):
    harness.client.send(Mount("a", NEWER))
    state, result = harness.client.receive(2)
    assert (state.models, result) == ((FAKE_ENCODER, NEWER), MountResult("a"))
    precisions = [ModelPrecision(each.name, each.fingerprint, "float32", 1.0) for each in (FAKE_ENCODER, NEWER)]
    assert list(harness.runtime.precisions()) == precisions
    harness.client.send(request("1", 1, 2, spec=FAKE_ENCODER), request("2", 1, 2))
    assert {each.attempt_id for each in harness.client.receive(2)} == {"1", "2"}
    harness.client.send(request("slow", 1, 500, 2))
    assert harness.began.wait(TIMEOUT_S)
    harness.client.send(Cancel("slow"))  # which ends the request, and not its batch
    assert harness.client.receive()[0].code == "cancelled"
    harness.client.send(Unmount("b", NEWER.name, NEWER.fingerprint))
    assert harness.client.receive()[0].models == (FAKE_ENCODER,)
    harness.client.send(request("late", 1, 2))
    (late,) = harness.client.receive()
    assert (late.attempt_id, late.code) == ("late", "engine_unavailable")
    harness.client.send(request("3", 1, 2, spec=FAKE_ENCODER))
    assert isinstance(harness.client.receive()[0], Finished)
    assert all(session() for session in harness.newer)
    harness.go_on.set()
    assert harness.client.receive() == [MountResult("b")]
    assert not any(session() for session in harness.newer)
    assert list(harness.runtime.precisions()) == precisions[:1]
    assert {batch_key.model for batch_key in harness.runtime.scheduler.costs.steps} == {FAKE_ENCODER.key}


def test_an_encoder_of_another_architecture_is_measured(harness):
    other = msgspec.structs.replace(FAKE_ENCODER, name="other", fingerprint="other0000000")
    harness.runtime.load_beside(other).add()
    assert {batch_key.model for batch_key in harness.runtime.scheduler.costs.steps} == {FAKE_ENCODER.key, other.key}


def test_results_that_are_not_finite_reject_the_model(harness, monkeypatch):
    monkeypatch.setattr(FakeSession, "run", lambda *_: [np.full(8, np.nan)])
    harness.client.send(Mount("a", NEWER))
    (result,) = harness.client.receive()
    assert "its results are not finite" in result.error
    monkeypatch.undo()
    harness.client.send(request("1", 1, 2, spec=FAKE_ENCODER))
    assert isinstance(harness.client.receive()[0], Finished)


@pytest.fixture
def newer_folder(small_folder, tmp_path):
    """A second version of the small encoder."""
    folder = tmp_path / small_folder.name
    make_encoder(folder, **sentence_transformer())
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    tensors["embeddings.LayerNorm.bias"] += 1.0
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_real_encoder_is_loaded_with_as_many_sessions_as_the_others(small, newer_folder):
    newer = open_exported(str(newer_folder))
    assert (newer.name, newer.fingerprint != small.fingerprint) == (small.name, True)
    runtime = load_runtime([small], EngineConfig(encoder_sessions=3, threads=1, mount_niceness=5), "cpu")
    try:
        runtime.load_beside(newer).add()
        results = []
        for number, spec in enumerate((small, newer, small)):
            prepared = runtime.executor.prepare(make_text_request(f"r{number}", [1, 7, 2], model=spec,
                                                                  model_version=spec.fingerprint))  # fmt: skip
            (_, sessions), rows = runtime.executor._models[spec.key], prepared.rows
            assert len(sessions) == 3
            results.append(sessions[-1].run([rows[0]])[0])
        np.testing.assert_array_equal(results[0], results[2])
        assert np.abs(results[0] - results[1]).max() > 1e-3
        runtime.release(newer.key)
    finally:
        runtime.executor.close()


def test_the_log_names_the_device_before_an_encoder_is_loaded(small, caplog):
    caplog.set_level("INFO")
    runtime = load_runtime([small], EngineConfig(encoder_sessions=1, threads=1), "auto")
    runtime.executor.close()
    first, second, *_ = (record.noria_fields for record in caplog.records)
    assert (first["event"], first["device"], second["event"]) == ("libraries_imported", runtime.device, "part_loaded")


def test_an_encoder_that_does_not_fit_the_memory_or_is_damaged_is_rejected(small, newer_folder):
    runtime = load_runtime([small], EngineConfig(encoder_sessions=1), "cpu", free_bytes=lambda _device: free_bytes)
    try:
        newer, free_bytes = open_model(str(newer_folder)), 1000
        with pytest.raises(ModelError, match="of which 1,000 are free"):
            runtime.load_beside(newer)
        free_bytes = 10**12
        shutil.rmtree(newer_folder)
        with pytest.raises(ModelError, match="missing"):
            runtime.load_beside(newer)
    finally:
        runtime.executor.close()
