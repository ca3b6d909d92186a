"""The threads of an engine whose sessions execute batches, with a real channel and sessions without a model."""

import threading

import msgspec
import numpy as np
import pytest

from noria.config import EngineConfig
from noria.engine.encoder.loading import make_runtime
from noria.engine.engines import BatchEngine
from noria.engine.monitoring.crash_journal import read_in_flight
from noria.observe.metrics.declarations import REGISTRY
from noria.protocol.live_views import ShareView
from noria.protocol.messages import (
    Cancel,
    EngineLoad,
    EngineView,
    Failed,
    Finished,
    Hello,
    LoadAck,
    Ping,
    ViewRequest,
    deserialize_from_engine,
    serialize,
)
from noria.protocol.text import TextResult, TextSettingsView
from noria.protocol.transport import pack, unpack
from noria.testing.fake_encoder import FAKE_ENCODER, FakeSession, fake_vector, make_text_request
from running_engine import RunningEngine
from waiting import TIMEOUT_S


class Harness(RunningEngine):
    """An engine with two sessions and a client."""

    def __init__(self, folder):
        super().__init__(folder, [FAKE_ENCODER], name="engine-7")
        self.held, self.go_on, self.received = threading.Event(), threading.Event(), []
        sessions = [FakeSession(self.on_batch), FakeSession(self.on_batch)]
        self.runtime = make_runtime({FAKE_ENCODER: sessions}, EngineConfig(), "cpu")
        self.start(self.runtime, BatchEngine)
        self.client = self.connect()

    def on_batch(self, rows):
        """Token 500 waits until `go_on` is set; token 501 fails."""
        ids = {int(each) for row in rows for each in row.ids}
        if 500 in ids:
            self.held.set()
            assert self.go_on.wait(TIMEOUT_S)
        if 501 in ids:
            raise RuntimeError("501 is not liked")

    def send(self, *messages):
        self.client.send(*messages)

    def receive(self, ignored=(EngineLoad,)):
        while True:
            while not self.received:
                frames = self.client.socket.recv_multipart()
                self.received = [(deserialize_from_engine(message), data) for message, data in unpack(frames)]
            message, data = self.received.pop(0)
            if not isinstance(message, ignored):
                return message, data

    def close(self):
        self.go_on.set()
        super().close()
        self.runtime.executor.close()


@pytest.fixture
def harness(tmp_path):
    made = Harness(tmp_path)
    yield made
    made.close()


def test_a_request_is_answered_by_one_message_with_all_its_vectors(harness):
    harness.send(make_text_request("a", [1, 7, 2], [1, 8, 9, 2], normalize=False))
    finished, data = harness.receive()
    assert isinstance(finished, Finished)
    assert (finished.attempt_id, finished.result, finished.num_steps_run) == ("a", TextResult(2, 8), 1)
    assert finished.timings.infer_s > 0
    assert finished.predicted_s is not None
    values = np.frombuffer(data, "<f4").reshape(2, 8)
    np.testing.assert_array_equal(values, [fake_vector([1, 7, 2]), fake_vector([1, 8, 9, 2])])


def test_both_sessions_run_at_once_and_the_journal_has_what_is_in_flight(harness):
    harness.send(make_text_request("slow", [1, 500, 2]))
    assert harness.held.wait(TIMEOUT_S)
    for name in ("b", "c", "d", "e"):
        harness.send(make_text_request(name, [1, 2]))
        assert harness.receive()[0].attempt_id == name
    harness.held.clear()
    harness.send(make_text_request("slow2", [1, 500, 2]))
    assert harness.held.wait(TIMEOUT_S)
    assert set(read_in_flight(harness.journal)) >= {"slow", "slow2"}
    harness.send(Ping())
    assert harness.receive()[0].busy_s > 0
    harness.go_on.set()
    assert {harness.receive()[0].attempt_id for _ in range(2)} == {"slow", "slow2"}
    harness.send(Ping())
    assert harness.receive()[0].busy_s == 0


def test_failed_cancelled_late_and_invalid_requests_are_answered(harness):
    harness.send(make_text_request("bad", [1, 501, 2]), make_text_request("invalid", [1, 2], lengths=(3,)))
    failures = {harness.receive()[0] for _ in range(2)}
    assert {(each.attempt_id, each.code) for each in failures} == {
        ("bad", "generation_failed"),
        ("invalid", "invalid_field"),
    }
    harness.send(make_text_request("late", [1, 500, 2], timeout_s=0.05))
    late, _ = harness.receive()
    assert (late.attempt_id, late.code) == ("late", "deadline_exceeded")
    harness.send(make_text_request("gone", [1, 500, 2]), Cancel("gone"))
    gone, _ = harness.receive()
    assert isinstance(gone, Failed)
    assert (gone.attempt_id, gone.code) == ("gone", "cancelled")
    harness.go_on.set()
    harness.send(make_text_request("next", [1, 2]))
    assert isinstance(harness.receive()[0], Finished)


def test_each_of_many_requests_is_answered_once_while_some_are_cancelled(harness):
    """Three threads drive the loop: what one sends or wakes must not be lost for another."""
    names = [f"r{number}" for number in range(600)]
    for start in range(0, len(names), 20):
        group = names[start : start + 20]
        sent = [make_text_request(name, [1, 7, 2]) for name in group] + [Cancel(name) for name in group[::3]]
        harness.client.socket.send_multipart(pack([(serialize(message), b"") for message in sent]))
    answers = [harness.receive()[0] for _ in names]
    assert sorted(answer.attempt_id for answer in answers) == sorted(names)
    assert {answer.code for answer in answers if isinstance(answer, Failed)} <= {"cancelled"}
    assert harness.runtime.scheduler.num_running == harness.runtime.scheduler.num_waiting == 0


def test_a_view_shows_the_batches(harness):
    request = make_text_request("a", [1, 500, 2], [1, 2])
    harness.send(msgspec.structs.replace(request, share_client="alice"))
    assert harness.held.wait(TIMEOUT_S)
    harness.send(ViewRequest(None, with_thumbnails=False))
    view, _ = harness.receive()
    assert isinstance(view, EngineView)
    assert view.num_slots == 16
    assert {slot.settings for slot in view.slots} == {TextSettingsView("embedding", 2, 5)}
    (share,) = view.shares
    assert (share.share_client, share.num_running) == ("alice", len(view.slots))
    harness.go_on.set()
    harness.receive()
    harness.send(ViewRequest(0, with_thumbnails=False))
    after, _ = harness.receive()
    assert sum(each.batch.num_tokens for each in after.iterations) == 5
    assert ("a", 0, "ok") in {(each.request_id, each.index, each.outcome) for each in after.departures}
    while after.rates.images_per_s == 0:  # rates are computed once a second
        harness.send(ViewRequest(after.last_iteration, with_thumbnails=False))
        after, _ = harness.receive()
    assert after.shares == (ShareView("alice", 1.0, 0, 0, 0, 0),)


def test_the_load_is_sent_when_the_engine_becomes_idle(harness):
    harness.send(Hello("front"))
    harness.receive()
    load, _ = harness.receive(ignored=())
    assert (load.num_running, load.num_waiting, load.num_slots) == (0, 0, 16)
    harness.send(LoadAck(), make_text_request("a", [1, 2]))
    harness.receive()
    assert REGISTRY.get_sample_value("noria_tokens_total", {"engine": "engine-7", "model": "fake-encoder"}) >= 2
