"""The loop of batches with sessions that a test ends, on virtual time."""

import math

import pytest

from noria.engine.encoder.request import prepare
from noria.engine.loop import BatchLoop, ProgressChanged, RequestEnded
from noria.engine.runtime import FinishedBatch
from noria.scheduling.batch.scheduler import BatchScheduler
from noria.scheduling.types import BatchResult, FinishReason, ItemId
from noria.testing.fake_encoder import FAKE_ENCODER, make_text_request
from noria.testing.virtual_clock import START, VirtualClock


class ManualExecutor:
    """A `BatchExecutor` whose batches last until a test ends them."""

    def __init__(self):
        self.held, self.running = set(), {}

    def accept(self, prepared):
        self.held.add(prepared.request.attempt_id)

    def forget(self, attempt_id):
        self.held.remove(attempt_id)

    def start(self, plan, on_done):
        assert plan.session not in self.running
        assert {row.attempt_id for row in plan.rows} <= self.held
        self.running[plan.session] = plan, on_done

    def finish(self, session=0, **result):
        plan, on_done = self.running.pop(session)
        on_done(FinishedBatch(plan, BatchResult(**result), 0.0))


class Harness:
    """A loop, its clock, and what happened."""

    def __init__(self, **limits):
        self.clock, self.executor = VirtualClock(), ManualExecutor()
        self.events, self.plans = [], []
        self.loop = BatchLoop(
            BatchScheduler(**limits), self.executor, self.events.append, self.clock, self.plans.append, self.on_done
        )

    def on_done(self, batch):
        self.executed = self.loop.finish(batch)
        self.loop.start_batches()

    def submit(self, request_id, *lengths, **changes):
        request = make_text_request(request_id, *([5] * length for length in lengths), **changes)
        self.loop.submit(prepare(request, FAKE_ENCODER))
        self.loop.start_batches()

    def ends(self):
        return {e.event.attempt_id: e.event.finish_reason for e in self.events if isinstance(e, RequestEnded)}


def test_sessions_run_side_by_side_and_end_in_any_order():
    harness = Harness()
    harness.submit("a", 4)
    harness.submit("b", 4)
    harness.submit("c", 4)
    assert sorted(harness.executor.running) == [0, 1]
    harness.executor.finish(1)
    assert harness.ends() == {"b": FinishReason.FINISHED}
    assert harness.executor.running[1][0].rows == (ItemId("c", 0),)
    harness.executor.finish(0)
    harness.executor.finish(1)
    assert set(harness.ends()) == {"a", "b", "c"}
    assert not harness.executor.held


def test_the_end_says_what_was_predicted_and_progress_is_only_reported_to_streams():
    harness = Harness()
    harness.submit("a", 4)
    harness.submit("b", 4, stream_progress=True)
    harness.executor.finish(0)
    *reported, ended = harness.events
    assert {(type(event), event.prepared.request.request_id) for event in reported} == {(ProgressChanged, "b")}
    assert ended.event.predicted_s == 0.0  # nothing is measured yet


def test_a_request_expires_while_its_batch_runs_and_frees_nothing_twice():
    harness = Harness(num_sessions=1)
    harness.submit("a", 4, timeout_s=2.0)
    harness.submit("b", 4, timeout_s=math.inf)
    assert harness.loop.wait_s(START + 0.5) == 1.5
    harness.clock.now = START + 2.0
    harness.loop.start_batches()
    assert harness.ends() == {"a": FinishReason.EXPIRED}
    assert harness.loop.wait_s(START + 2.0) is None
    harness.executor.finish()
    assert harness.executed.requests == (None,)
    harness.executor.finish()
    assert harness.ends() == {"a": FinishReason.EXPIRED, "b": FinishReason.FINISHED}


def test_a_batch_that_waits_for_company_says_for_how_long():
    harness = Harness(max_wait_s=0.5)
    harness.submit("a", 4)
    harness.submit("b", 4)
    assert harness.loop.wait_s(START) == 0.5
    harness.clock.now = START + 0.5
    harness.loop.start_batches()
    assert sorted(harness.executor.running) == [0, 1]


def test_a_batch_without_memory_is_planned_smaller():
    harness = Harness(num_sessions=1)
    harness.submit("a", 4, 4)
    harness.executor.finish(fits=False)
    assert [len(plan.rows) for plan in harness.plans] == [2, 1]
    harness.executor.finish()
    harness.executor.finish()
    assert harness.ends() == {"a": FinishReason.FINISHED}


def test_a_failing_text_fails_no_other_request():
    harness = Harness(num_sessions=1)
    harness.submit("busy", 4)
    harness.submit("bad", 4)
    harness.submit("good", 4)
    harness.submit("other", 4)  # for its sake a batch is worth the delay
    harness.executor.finish()
    assert [row.attempt_id for row in harness.plans[-1].rows] == ["bad", "good"]
    harness.executor.finish(failed={ItemId("bad", 0): "not finite"})
    harness.executor.finish()
    assert harness.ends() == {
        "busy": FinishReason.FINISHED,
        "bad": FinishReason.FAILED,
        "good": FinishReason.FINISHED,
        "other": FinishReason.FINISHED,
    }


@pytest.mark.parametrize("ended_first", [True, False])
def test_cancelling_waiting_and_running_texts(ended_first):
    harness = Harness(num_sessions=1)
    harness.submit("a", 4)
    harness.submit("b", 4)
    if ended_first:
        harness.executor.finish()
    harness.loop.cancel("a")
    harness.loop.cancel("b")
    harness.executor.finish()
    assert harness.ends() == {
        "a": FinishReason.FINISHED if ended_first else FinishReason.CANCELLED,
        "b": FinishReason.CANCELLED,
    }
    assert not harness.executor.running
