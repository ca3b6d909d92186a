"""The wheel with a fake device on virtual time."""

import math

import msgspec
import pytest

from noria.engine.executor import FakeExecutor, VirtualClock
from noria.engine.loop import Ended, ImageReady, Moved, PreviewReady, Wheel
from noria.request import ImageRequest
from noria.scheduling.plans import End, ImageId
from noria.scheduling.steps import StepScheduler


def request(request_id="a", steps=3, images=1, side_px=8, timeout_s=math.inf, seed=7):
    return ImageRequest(request_id, "a circle", "", seed, side_px, side_px, steps, 2.0, images, "ddim", timeout_s)


class World:
    """A wheel, its clock, and everything it delivered."""

    def __init__(self, slots=4, turn_s=lambda plan: 1.0, **limits):
        self.clock = VirtualClock()
        self.executor = FakeExecutor(self.clock, turn_s)
        self.delivered = []
        self.wheel = Wheel(StepScheduler(slots, **limits), self.executor, self.delivered.append, self.clock)

    def submit(self, wish):
        self.wheel.submit(self.executor.prepare(wish))

    def run(self):
        turns = []
        while (turn := self.wheel.turn()) is not None:
            turns.append(turn)
        return turns

    def ends(self):
        return {e.event.request_id: e.event.end for e in self.delivered if isinstance(e, Ended)}


def test_an_image_is_delivered_before_its_request_ends():
    world = World()
    world.submit(request(images=2))
    world.run()
    assert [type(event) for event in world.delivered] == [Moved, ImageReady, ImageReady, Ended]
    _, first, second, _ = world.delivered
    assert (first.index, first.pixels.rgb()) == (0, bytes([7]) * 192)
    assert second.pixels.rgb() == bytes([8]) * 192


def test_nothing_waits_for_company():
    world = World()
    world.submit(request("early", steps=10))
    for _ in range(4):
        world.wheel.turn()
    world.submit(request("late", steps=3))
    world.run()
    late = next(e for e in world.delivered if isinstance(e, Ended) and e.event.request_id == "late")
    assert late.event.times.queue_s == 0
    assert world.clock.now == 10  # three of the ten turns carried both


def test_a_lone_request_takes_its_steps_and_no_turn_more():
    world = World()
    world.submit(request(steps=12))
    assert len(world.run()) == 12


def test_a_request_past_its_time_expires_at_the_next_turn():
    world = World()
    world.submit(request("slow", steps=100, timeout_s=5.5))
    world.submit(request("quick", steps=20))
    world.run()
    assert world.ends() == {"slow": End.EXPIRED, "quick": End.FINISHED}
    assert world.clock.now == 20


def test_a_failing_image_takes_nobody_with_it():
    world = World()
    world.submit(request("bad", steps=9))
    world.submit(request("good", steps=9))
    world.executor.failing[ImageId("bad", 0)] = "overflow"
    world.run()
    assert world.ends() == {"bad": End.FAILED, "good": End.FINISHED}


def test_a_refused_request_is_told_when_to_come_back():
    world = World(slots=1, queue_limit=1)
    world.submit(request("a", steps=10))
    world.wheel.turn()
    world.submit(request("b", steps=10))
    world.submit(request("c", steps=10))
    refused = world.delivered[-1]
    assert (refused.event.end, refused.event.retry_after_s) == (End.REFUSED, 9.5)


def test_waiting_and_deadline_count_from_the_arrival():
    world = World()
    world.clock.now = 10.0
    world.wheel.submit(world.executor.prepare(request("a", steps=5, timeout_s=8.0)), arrived=4.0)
    world.run()
    ended = world.delivered[-1].event
    assert (ended.end, world.clock.now) == (End.EXPIRED, 12.0)


def test_nothing_is_held_for_requests_that_ended():
    world = World(slots=2, queue_limit=1)
    for k in range(6):
        world.submit(request(f"r{k}", steps=3, timeout_s=2.5 if k == 1 else math.inf))
    world.wheel.cancel("r0")
    world.run()
    assert len(world.ends()) == 6
    assert not world.executor._accepted
    assert not world.wheel._requests


def test_the_fake_device_notices_a_step_out_of_order():
    world = World()
    world.submit(request("a", steps=3))
    plan = world.wheel.scheduler.plan(0)
    world.executor.execute(plan)
    with pytest.raises(AssertionError, match="slot holds"):
        world.executor.execute(plan.__class__((), plan.steps, ()))


def test_a_watched_request_is_followed_from_the_queue_to_its_end():
    world = World(slots=1)
    world.submit(request("first", steps=2))
    world.submit(msgspec.structs.replace(request("second", steps=3), watched=True))
    world.run()
    seen = [
        e.whereabouts for e in world.delivered if isinstance(e, Moved) and e.prepared.request.request_id == "second"
    ]
    assert [(at.queue_position, at.call) for at in seen] == [(1, 0), (0, 0), (0, 0), (None, 1), (None, 2)]
    # A fake turn takes a second; before the first nothing is known.
    assert [at.finish_in_s for at in seen] == pytest.approx([0.0, 4.0, 3.0, 2.0, 1.0])


def test_previews_come_on_the_way_and_never_after_the_end():
    world = World()
    world.submit(msgspec.structs.replace(request(images=2, steps=9), num_previews=2))
    world.run()
    shown = [(e.preview.image.index, e.preview.call) for e in world.delivered if isinstance(e, PreviewReady)]
    assert shown == [(0, 3), (1, 3), (0, 6), (1, 6)]


def test_work_that_does_not_fit_the_memory_is_done_in_smaller_batches():
    for memory in ({"boards": 3}, {"steps": 2}, {"decodes": 1}, {"boards": 2, "steps": 1, "decodes": 1}):
        world = World(slots=8)
        world.executor.memory = memory
        for k in range(8):
            world.submit(request(f"r{k}", steps=3))
        world.run()
        assert set(world.ends().values()) == {End.FINISHED}
        assert len(world.ends()) == 8


@pytest.mark.parametrize("part", ["boards", "steps", "decodes"])
def test_only_what_does_not_fit_alone_fails(part):
    world = World()
    world.executor.memory = {part: 0}
    world.submit(request("a"))
    world.submit(request("b"))
    world.run()
    assert world.ends() == {"a": End.FAILED, "b": End.FAILED}
    reasons = {e.event.reason for e in world.delivered if isinstance(e, Ended)}
    assert reasons == {"8x8 does not fit the memory of the device, even alone"}
