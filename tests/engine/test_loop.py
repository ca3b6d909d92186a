"""The engine loop with a fake device on virtual time."""

import math

import msgspec
import pytest

from noria.engine.loop import PreviewReady, ProgressChanged, RequestEnded, ResultReady, StepLoop
from noria.scheduling.costs import CostCurve, CostModel
from noria.scheduling.step.scheduler import StepScheduler
from noria.scheduling.types import BatchKey, FinishReason, ItemId
from noria.testing.fake_executor import FakeExecutor
from noria.testing.requests import make_image_request
from noria.testing.virtual_clock import START, VirtualClock


def request(request_id="a", steps=3, images=1, side_px=8, timeout_s=math.inf, seed=7, **changes):
    settings = {"width": side_px, "height": side_px, "inference_steps": steps, "n": images, "seed": seed}
    return make_image_request(request_id, timeout_s=timeout_s, **settings, **changes)


class Harness:
    """A loop, its clock and its events."""

    def __init__(self, slots=4, iteration_s=lambda plan: 1.0, **limits):
        self.clock = VirtualClock()
        self.executor = FakeExecutor(self.clock, iteration_s)
        self.events = []
        self.loop = StepLoop(StepScheduler(slots, **limits), self.executor, self.events.append, self.clock)

    def submit(self, image_request):
        self.loop.submit(self.executor.prepare(image_request))

    def run(self):
        iterations = []
        while (iteration := self.loop.run_iteration()) is not None:
            iterations.append(iteration)
        return iterations

    def ends(self):
        return {e.event.attempt_id: e.event.finish_reason for e in self.events if isinstance(e, RequestEnded)}


def test_an_image_is_ready_before_its_request_ends():
    harness = Harness()
    harness.submit(request(images=2))
    harness.run()
    assert [type(event) for event in harness.events] == [ProgressChanged, ResultReady, ResultReady, RequestEnded]
    _, first, second, _ = harness.events
    assert (first.index, first.result.pixels.rgb()) == (0, bytes([7]) * 192)
    assert second.result.pixels.rgb() == bytes([8]) * 192


def test_a_request_joins_a_running_batch_at_once():
    harness = Harness()
    harness.submit(request("early", steps=10))
    for _ in range(4):
        harness.loop.run_iteration()
    harness.submit(request("late", steps=3))
    harness.run()
    late = next(e for e in harness.events if isinstance(e, RequestEnded) and e.event.attempt_id == "late")
    assert late.event.timings.queue_s == 0
    assert harness.clock.now == START + 10  # three of the ten iterations step both


@pytest.mark.parametrize("num_others", [0, 2])
def test_half_of_the_calls_are_predicted_to_take_half_of_the_time_and_do(num_others):
    key = BatchKey(8, 8)
    costs = CostModel(8, {key: CostCurve({2: 0.1, 8: 0.25})})
    costs.decodes[key] = CostCurve({1: 0.02})
    predicted_s, took_s = {}, {}
    for calls in (1.0, 0.5):
        harness = Harness(iteration_s=lambda plan: costs.step_s(key, 2 * len(plan.steps)), costs=costs)
        for number in range(num_others):
            harness.submit(request(f"other{number}", steps=200))
        harness.submit(request("a", steps=28, calls=calls))
        predicted_s[calls] = harness.loop.scheduler.progress(["a"], START)["a"].finish_in_s
        while "a" not in harness.ends():
            harness.loop.run_iteration()
        took_s[calls] = harness.clock.now - START
    assert predicted_s[0.5] == pytest.approx(predicted_s[1.0] / 2, rel=0.05)
    assert took_s == pytest.approx(predicted_s, rel=0.02)


def test_a_single_request_takes_exactly_its_steps():
    harness = Harness()
    harness.submit(request(steps=12))
    assert len(harness.run()) == 12


def test_a_request_past_its_timeout_expires_at_the_next_iteration():
    harness = Harness()
    harness.submit(request("slow", steps=100, timeout_s=5.5))
    harness.submit(request("quick", steps=20))
    harness.run()
    assert harness.ends() == {"slow": FinishReason.EXPIRED, "quick": FinishReason.FINISHED}
    assert harness.clock.now == START + 20


def test_a_failing_image_fails_no_other_request():
    harness = Harness()
    harness.submit(request("bad", steps=9))
    harness.submit(request("good", steps=9))
    harness.executor.failing[ItemId("bad", 0)] = "overflow"
    harness.run()
    assert harness.ends() == {"bad": FinishReason.FAILED, "good": FinishReason.FINISHED}


def test_a_rejected_request_gets_a_retry_time():
    harness = Harness(slots=1, queue_limit=1)
    harness.submit(request("a", steps=10))
    harness.loop.run_iteration()
    harness.submit(request("b", steps=10))
    harness.submit(request("c", steps=10))
    rejected = harness.events[-1]
    assert (rejected.event.finish_reason, rejected.event.retry_after_s) == (FinishReason.REJECTED, 9.5)


def test_queue_time_and_timeout_count_from_the_arrival():
    harness = Harness()
    harness.clock.now = START + 10.0
    harness.loop.submit(harness.executor.prepare(request("a", steps=5, timeout_s=8.0)), arrived=START + 4.0)
    harness.run()
    ended = harness.events[-1].event
    assert (ended.finish_reason, harness.clock.now) == (FinishReason.EXPIRED, START + 12.0)


def test_nothing_is_held_for_requests_that_ended():
    harness = Harness(slots=2, queue_limit=1)
    for k in range(6):
        harness.submit(request(f"r{k}", steps=3, timeout_s=2.5 if k == 1 else math.inf))
    harness.loop.cancel("r0")
    harness.run()
    assert len(harness.ends()) == 6
    assert not harness.executor._accepted
    assert not harness.loop._requests


def test_the_fake_device_notices_a_step_out_of_order():
    harness = Harness()
    harness.submit(request("a", steps=3))
    plan = harness.loop.scheduler.plan(0)
    harness.executor.execute(plan)
    with pytest.raises(AssertionError, match="slot holds"):
        harness.executor.execute(plan.__class__((), plan.steps, ()))


def test_a_streaming_request_reports_progress_from_the_queue_to_its_end():
    harness = Harness(slots=1)
    harness.submit(request("first", steps=2))
    harness.submit(msgspec.structs.replace(request("second", steps=3), stream_progress=True))
    harness.run()
    reported = [
        e.progress
        for e in harness.events
        if isinstance(e, ProgressChanged) and e.prepared.request.request_id == "second"
    ]
    assert [(progress.queue_position, progress.call) for progress in reported] == [
        (1, 0),
        (0, 0),
        (0, 0),
        (None, 1),
        (None, 2),
    ]
    # A fake iteration takes a second; before the first one no cost is known.
    assert [progress.finish_in_s for progress in reported] == pytest.approx([0.0, 4.0, 3.0, 2.0, 1.0])


def test_previews_come_during_generation_and_never_after_the_end():
    harness = Harness()
    harness.submit(request(images=2, steps=9, partial_images=2))
    harness.run()
    previews = [(e.preview.image.index, e.preview.call) for e in harness.events if isinstance(e, PreviewReady)]
    assert previews == [(0, 3), (1, 3), (0, 6), (1, 6)]


def test_work_that_does_not_fit_the_memory_runs_in_smaller_batches():
    for memory in ({"joins": 3}, {"steps": 2}, {"decodes": 1}, {"joins": 2, "steps": 1, "decodes": 1}):
        harness = Harness(slots=8)
        harness.executor.memory = memory
        for k in range(8):
            harness.submit(request(f"r{k}", steps=3))
        harness.run()
        assert set(harness.ends().values()) == {FinishReason.FINISHED}
        assert len(harness.ends()) == 8


@pytest.mark.parametrize("phase", ["joins", "steps", "decodes"])
def test_only_requests_that_do_not_fit_alone_fail(phase):
    harness = Harness()
    harness.executor.memory = {phase: 0}
    harness.submit(request("a"))
    harness.submit(request("b"))
    harness.run()
    assert harness.ends() == {"a": FinishReason.FAILED, "b": FinishReason.FAILED}
    reasons = {e.event.message for e in harness.events if isinstance(e, RequestEnded)}
    assert reasons == {"8x8 pixels do not fit the device's memory, even alone"}
