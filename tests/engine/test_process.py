"""The engine's threads around the wheel: a real channel, a real client's socket, a fake device."""

import math
import threading
import time
import uuid

import msgspec
import pytest
import zmq

from noria.channel import EngineChannel
from noria.engine import process, showing
from noria.engine.desk import Desk
from noria.engine.executor import FakeExecutor, VirtualClock
from noria.engine.manifest import Manifest
from noria.engine.process import Engine
from noria.engine.watch import Watch
from noria.errors import GenerationFailed
from noria.messages import (
    Cancel,
    EngineState,
    Failed,
    Finished,
    Follow,
    Heard,
    Hello,
    ImageDone,
    Load,
    Ping,
    Pong,
    Progress,
    Submit,
    WheelView,
    decode_from_engine,
    encode,
)
from noria.models.catalog import open_model
from noria.observe import otlp
from noria.observe.otlp import OtlpTracer
from noria.observe.trace_context import TraceContext
from noria.observe.traces import NO_TRACER
from noria.request import ImageRequest
from noria.scheduling.steps import StepScheduler
from waiting import WITHIN_S, until

ENDLESS = 100_000
"""Steps of a request that is under way until it is cancelled, however long a busy machine holds up who cancels it."""


def request(request_id="a", steps=3, images=1, seed=7, scheduler="ddim"):
    return ImageRequest(request_id, "a circle", "", seed, 8, 8, steps, 2.0, images, scheduler, math.inf)


def brief(_plan):
    """A turn that leaves others the time to do something."""
    return float(not threading.Event().wait(0.01))


class SlowTailor(FakeExecutor):
    """A fake device on which "lms" takes until `compiled` is set, and seed 13 draws numbers that are none."""

    def __init__(self):
        self.compiled = threading.Event()
        super().__init__(VirtualClock())

    def is_prompt(self, request):
        return request.scheduler != "lms"

    def prepare(self, request):
        if request.scheduler == "lms":
            assert self.compiled.wait(WITHIN_S)
        return super().prepare(request)

    def take(self, image):
        pixels = super().take(image)
        if pixels.seed == 13:
            return NoPixels()
        if pixels.seed == 14:
            return LatePixels(pixels)
        return pixels


class LatePixels:
    """Of a device that works behind the wheel."""

    def __init__(self, pixels):
        self.pixels = pixels

    def rgb(self):
        time.sleep(0.3)
        return self.pixels.rgb()


class NoPixels:
    def rgb(self):
        raise GenerationFailed("not finite")


class Client:
    """A peer with one blocking socket."""

    def __init__(self, address):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.connect(address)
        self.socket.setsockopt(zmq.RCVTIMEO, int(WITHIN_S * 1000))

    def send(self, *messages):
        for message in messages:
            self.socket.send(encode(message))

    def hear(self, count=1, unheard=(Progress, Load)):
        """The next messages, but for those that come when they like."""
        heard = []
        while len(heard) < count:
            message = decode_from_engine(self.socket.recv_multipart()[0])
            if not isinstance(message, unheard):
                heard.append(message)
        return heard

    def close(self):
        self.socket.close(0)
        self.context.term()


@pytest.fixture
def tracer(request, collector, monkeypatch):
    """None, unless a test asks for one that brings its spans to the collector, however long that takes."""
    monkeypatch.setattr(otlp, "_CLOSE_WITHIN_S", WITHIN_S)
    opened = OtlpTracer(collector.endpoint, 1.0, "engine-0") if getattr(request, "param", None) else NO_TRACER
    yield opened
    opened.close()


traced = pytest.mark.parametrize("tracer", [True], indirect=True)


@pytest.fixture
def world(tmp_path, bundled_folder, tracer):
    class World:
        pass

    world = World()
    address = f"ipc://{tmp_path}/e"
    channel = EngineChannel(address)
    world.desk = Desk(
        channel,
        [open_model(str(bundled_folder))],
        "auto",
        watch=Watch(60.0, time.monotonic),
        manifest=Manifest(tmp_path / "aboard"),
        previous_end="killed",
        tracer=tracer,
    )
    world.desk.start()
    world.executor = SlowTailor()
    engine = Engine("engine-0", channel, world.desk, world.executor, StepScheduler(4, queue_limit=4), tracer)
    wheel = threading.Thread(target=engine.run)

    def start():
        world.desk.open(world.executor, "cpu", 8)
        wheel.start()

    world.start, world.client, world.other = start, Client(address), Client(address)
    yield world
    world.executor.compiled.set()
    engine.stop()
    if wheel.ident:
        wheel.join(WITHIN_S)
    world.client.close()
    world.other.close()
    channel.close()


def kinds(messages):
    return [type(message) for message in messages]


def test_a_peer_is_told_the_state_and_its_change(world):
    world.client.send(Hello("test"), Submit(request()))
    loading, refused = world.client.hear(2)
    assert (loading.state, loading.models) == ("loading", ())
    assert refused.code == "engine_unavailable"
    world.start()
    (ready,) = world.client.hear()
    assert isinstance(ready, EngineState)
    assert (ready.state, ready.device, ready.models[0].name) == ("ready", "cpu", "noria-shapes")


def test_a_ping_is_answered_while_it_loads_while_it_is_idle_and_while_a_turn_lasts(world):
    world.client.send(Hello("test"), Ping())
    state, loading = world.client.hear(2)
    assert (state.previous_end, loading) == ("killed", Pong(state.incarnation, 0.0, 60.0))
    world.start()
    (ready,) = world.client.hear()
    world.client.send(Ping())
    assert world.client.hear() == [Pong(ready.incarnation, 0.0, 60.0)]
    began, go_on = threading.Event(), threading.Event()
    world.executor.turn_s = lambda _plan: began.set() or float(not go_on.wait(WITHIN_S))
    world.client.send(Submit(request(steps=1)))
    assert began.wait(WITHIN_S)
    world.client.send(Ping())
    (pong,) = world.client.hear()
    assert isinstance(pong, Pong)
    assert pong.stuck_s > 0
    go_on.set()


def test_who_is_aboard_is_written_before_the_turn_and_told_by_the_next_life(world, tmp_path):
    world.start()
    began, go_on = threading.Event(), threading.Event()
    world.executor.turn_s = lambda _plan: began.set() or float(not go_on.wait(WITHIN_S))
    world.client.send(Submit(request("aboard")))
    assert began.wait(WITHIN_S)
    assert Manifest(tmp_path / "aboard").before == ("aboard",)
    go_on.set()
    world.client.send(Hello("test"))
    (state,) = [message for message in world.client.hear(3) if isinstance(message, EngineState)]
    assert state.aboard == ()  # at the end of the life before


def test_images_come_before_the_end(world):
    world.start()
    world.client.send(Submit(request(images=2)))
    first, second, end = world.client.hear(3)
    assert [(first.index, first.seed), (second.index, second.seed)] == [(0, 7), (1, 8)]
    assert isinstance(end, Finished)


def test_a_known_sampler_passes_one_that_is_being_compiled(world):
    world.start()
    world.client.send(Submit(request("slow", scheduler="lms")), Submit(request("quick")))
    assert [message.request_id for message in world.client.hear(2)] == ["quick", "quick"]
    world.executor.compiled.set()
    assert [message.request_id for message in world.client.hear(2)] == ["slow", "slow"]


def test_a_request_cancelled_while_its_sampler_is_compiled_is_never_drawn(world):
    world.start()
    world.client.send(Submit(request("slow", scheduler="lms")), Cancel("slow"))
    (gone,) = world.client.hear()
    assert (gone.request_id, gone.code) == ("slow", "cancelled")
    world.executor.compiled.set()
    world.client.send(Submit(request("next", scheduler="lms")))
    assert [message.request_id for message in world.client.hear(2)] == ["next", "next"]


def test_an_id_in_use_is_refused_to_whoever_comes_second(world):
    world.start()
    began, go_on = threading.Event(), threading.Event()
    world.executor.turn_s = lambda _plan: began.set() or float(not go_on.wait(WITHIN_S))
    world.client.send(Submit(request("same")))
    assert began.wait(WITHIN_S)
    world.other.send(Submit(request("same", seed=9)), Ping())
    assert kinds(world.other.hear()) == [Pong]  # the desk has passed it on
    go_on.set()
    (refused,) = world.other.hear()
    assert (refused.code, refused.field) == ("invalid_field", "request_id")
    image, end = world.client.hear(2)
    assert (image.request_id, image.seed, type(end)) == ("same", 7, Finished)


def test_more_images_than_can_ever_wait_are_the_callers_mistake(world):
    world.start()
    world.client.send(Submit(request(images=9)))
    (refused,) = world.client.hear()
    assert (refused.code, refused.field) == ("invalid_field", "n")


def test_an_image_that_is_not_finite_fails_its_request_once_and_no_other(world):
    world.start()
    world.client.send(Submit(request("bad", images=3, seed=12)), Submit(request("good", steps=9)))
    heard = world.client.hear(4)
    bad = [message for message in heard if message.request_id == "bad"]
    assert kinds(bad) == [ImageDone, Failed]
    assert (bad[-1].code, bad[-1].message) == ("generation_failed", "not finite")
    assert bad[-1].num_steps_run == 3
    assert bad[-1].timings is not None
    assert kinds(message for message in heard if message.request_id == "good") == [ImageDone, Finished]


def test_a_cancelled_request_is_answered(world):
    world.start()
    world.executor.turn_s = brief
    world.client.send(Submit(request("long", steps=ENDLESS)))
    world.other.send(Cancel("long"))  # not theirs
    world.client.send(Cancel("long"))
    (gone,) = world.client.hear()
    assert (gone.request_id, gone.code) == ("long", "cancelled")


def test_what_fails_is_told_with_where_its_time_went(world):
    world.start()
    began = threading.Event()
    world.executor.turn_s = lambda plan: began.set() or brief(plan)
    sent = time.monotonic()
    world.client.send(Submit(request("long", steps=ENDLESS)), Submit(request("along", steps=ENDLESS)))
    assert began.wait(WITHIN_S)
    for name in ("long", "along"):
        world.client.send(Submit(request(f"after-{name}", steps=5)))
        world.client.hear(2)
        world.client.send(Cancel(name))
        (gone,) = world.client.hear()
        assert (gone.request_id, gone.code) == (name, "cancelled")
        assert gone.timings.denoise_s > 5 * 0.009 and gone.timings.queue_s >= 0
        assert gone.timings.queue_s + gone.timings.denoise_s < time.monotonic() - sent
        assert gone.num_steps_run >= 5
        assert 1 < gone.mean_batch <= 3


def test_a_request_is_timed_until_its_pixels_are_there(world):
    world.start()
    world.client.send(Submit(request(seed=14)))
    _, finished = world.client.hear(2)
    assert finished.timings.encode_s + finished.timings.denoise_s + finished.timings.decode_s >= 0.3
    assert (finished.num_steps_run, finished.mean_batch) == (3, 1.0)


def test_what_never_boarded_is_told_with_how_long_it_waited(world):
    world.start()
    world.client.send(Submit(request("slow", scheduler="lms")), Submit(request("many", images=9)), Cancel("slow"))
    for gone in world.client.hear(2):
        assert gone.timings.queue_s > 0
        assert (gone.timings.denoise_s, gone.num_steps_run) == (0, 0)


def test_the_requests_of_a_front_ends_life_before_leave_when_its_next_one_greets(world):
    world.start()
    world.executor.turn_s = brief
    old, new = world.client, world.other
    old.send(
        Hello("front"),
        Submit(request("warm", steps=1)),
        *(Submit(request(f"long-{k}", steps=ENDLESS)) for k in range(4)),
    )
    old.send(Submit(request("waits", steps=ENDLESS)), Submit(request("compiled", scheduler="lms")), Ping())
    assert sorted(kind.__name__ for kind in kinds(old.hear(4))) == ["EngineState", "Finished", "ImageDone", "Pong"]
    new.send(Hello("front"))
    assert kinds(new.hear()) == [EngineState]
    gone = old.hear(5)
    assert {(message.request_id, message.code) for message in gone} == {
        (name, "cancelled") for name in ("long-0", "long-1", "long-2", "long-3", "waits")
    }
    world.executor.compiled.set()
    new.send(Submit(request("next", scheduler="lms")))
    assert [message.request_id for message in new.hear(2)] == ["next", "next"]
    old.socket.setsockopt(zmq.RCVTIMEO, 100)
    with pytest.raises(zmq.Again):
        old.hear()  # "compiled" was not drawn
    assert len(world.desk._peers) == 1


def test_a_peer_of_another_name_takes_nobody_out(world):
    world.start()
    world.client.send(Hello("one"), Submit(request("slow", scheduler="lms")), Submit(request("quick", steps=50)))
    world.client.hear()
    world.other.send(Hello("two"))
    world.other.hear()
    world.executor.compiled.set()
    assert {message.request_id for message in world.client.hear(4)} == {"slow", "quick"}


def test_a_peer_that_does_not_read_gets_one_load_and_all_its_answers(world, monkeypatch):
    monkeypatch.setattr(process, "_BETWEEN_LOADS_S", 0.0)  # one after every turn
    world.start()
    silent, reader = world.client, world.other
    silent.send(Submit(request("first", steps=1)))
    silent.hear(2)  # from now on it has a load to tell
    for name, peer in (("silent", silent), ("reader", reader)):
        peer.send(Hello(name))
        assert kinds(peer.hear(2, unheard=())) == [EngineState, Load]
    go_on, loads = threading.Semaphore(0), []
    world.executor.turn_s = lambda _plan: float(go_on.acquire(timeout=WITHIN_S))
    silent.send(Submit(request("busy", steps=4)))
    for _ in range(4):
        reader.send(Heard())
        go_on.release()
        loads += reader.hear(unheard=())
    assert [load.num_seated for load in loads] == [1, 1, 1, 0]
    assert kinds(silent.hear(3, unheard=())) == [Progress, ImageDone, Finished]
    silent.send(Heard())
    assert silent.hear(unheard=()) == loads[-1:]  # the newest, and none of those between
    silent.send(Heard(), Ping())
    assert kinds(silent.hear(unheard=())) == [Pong]


def test_a_follow_of_an_idle_wheel_is_answered_and_the_next_one_when_somebody_comes(world):
    world.client.send(Hello("page"), Follow(None, pictures=True))
    (loading,) = world.client.hear()
    assert loading.state == "loading"
    world.start()
    view, ready = sorted(world.client.hear(2), key=lambda message: isinstance(message, EngineState))
    assert (view.incarnation, view.number, view.num_slots) == (ready.incarnation, 0, 4)
    world.client.send(Follow(0, pictures=True), Ping())
    assert kinds(world.client.hear()) == [Pong]  # there is nothing new
    world.executor.turn_s = brief
    world.other.send(Submit(request("one.f00d", steps=ENDLESS, images=2)))
    seats, calls, cells = set(), [], 0
    while len(calls) < 4 or cells < 2:
        (view,) = world.client.hear()
        seats |= {(seat.request_id, seat.index) for seat in view.seats}
        calls += [view.seats[0].call] if view.seats else []
        cells = max(cells, len(view.cells))
        world.client.send(Follow(view.number, pictures=True))
    assert seats == {("one", 0), ("one", 1)}
    assert calls == sorted(set(calls))
    assert cells == 2


def test_after_every_slow_turn_who_follows_sees_it_with_its_pictures(world, monkeypatch):
    monkeypatch.setattr(showing, "MOST_BETWEEN_VIEWS_S", showing.BETWEEN_VIEWS_S)  # however busy this machine is

    def slow(_plan):
        """As any turn that lasts: the next view is asked for meanwhile."""
        threading.Event().wait(showing.BETWEEN_VIEWS_S + 0.05)
        return float(until(lambda: not world.desk.arrivals.empty()))

    world.executor.turn_s = slow
    world.start()
    world.client.send(Submit(request(steps=6)), Follow(None, pictures=True))
    views = []
    while not views or views[-1].number < 5:
        views += world.client.hear()
        world.client.send(Follow(views[-1].number, pictures=True))
    turned = [view for view in views if view.number]
    assert [view.number for view in turned] == [1, 2, 3, 4, 5]
    assert [view.seats[0].call for view in turned] == [1, 2, 3, 4, 5]
    assert [len(view.cells) for view in turned[1:]] == [1, 1, 1, 1]  # the first may have begun before anybody followed


def test_the_pictures_of_a_view_are_the_frame_beside_it(world):
    world.start()
    world.executor.turn_s = brief
    world.other.send(Submit(request("one", steps=ENDLESS, seed=9)))
    view, seen = None, None
    while view is None or not view.cells:
        world.client.send(Follow(seen, pictures=True))
        while not isinstance(
            view := decode_from_engine((frames := world.client.socket.recv_multipart())[0]), WheelView
        ):
            pass
        seen = view.number
    (cell,) = view.cells
    assert (cell.request_id, cell.width_px, cell.height_px, cell.offset, frames[1]) == ("one", 1, 1, 0, bytes([9] * 3))


def test_a_front_end_that_greets_anew_is_shown_nothing_that_its_life_before_asked_for(world):
    world.start()
    world.client.send(Hello("front"), Follow(None, pictures=False))
    assert WheelView in kinds(world.client.hear(2))
    world.client.send(Follow(0, pictures=False), Ping())
    assert kinds(world.client.hear()) == [Pong]  # so the desk has read what was before it
    world.other.send(Hello("front"), Submit(request("quick", steps=1)))
    assert Finished in kinds(world.other.hear(3))
    world.client.send(Ping())
    assert kinds(world.client.hear()) == [Pong]


def asked_by(submitted, *, is_sampled=True):
    """The request as part of a trace, and that."""
    caller = TraceContext(uuid.uuid4().hex, uuid.uuid4().hex[:16], is_sampled, "vendor=x")
    return msgspec.structs.replace(submitted, traceparent=caller.traceparent, tracestate="vendor=x"), caller


def stages(collector, tracer, caller):
    """What came of the trace, in order: each stage's name and why it failed."""
    tracer.close()
    spans = sorted(collector.of_trace(caller.trace_id), key=lambda span: (span.began, span.ended))
    assert {(span.parent_id, span.tracestate) for span in spans} <= {(caller.span_id, "vendor=x")}
    assert all(span.failed == ("error.type" in span.attributes) for span in spans)
    return [(span.name, span.attributes.get("error.type")) for span in spans]


@traced
def test_a_request_that_was_drawn_has_all_its_stages(world, collector, tracer):
    world.start()
    submitted, caller = asked_by(request("an-id.0a1b"))
    world.client.send(Submit(submitted))
    world.client.hear(2)
    found = stages(collector, tracer, caller)
    assert sorted(name for name, why in found if why is None) == ["decode", "denoise", "encode", "queue"]
    (denoise,) = [span for span in collector.of_trace(caller.trace_id) if span.name == "denoise"]
    assert denoise.attributes == {
        "noria.request_id": "an-id",
        "gen_ai.request.model": "",
        "noria.steps": 3,
        "noria.scheduler": "ddim",
        "noria.mean_batch": 1.0,
        "noria.slots": 4,
    }


@traced
def test_a_request_that_nobody_records_has_none(world, collector, tracer):
    world.start()
    submitted, caller = asked_by(request(), is_sampled=False)
    world.client.send(Submit(submitted), Submit(request("untraced")))
    world.client.hear(4)
    assert stages(collector, tracer, caller) == []


@traced
def test_a_request_refused_by_the_desk_waited_for_nothing(world, collector, tracer):
    early, caller = asked_by(request("early"))
    world.client.send(Hello("test"), Submit(early))
    world.client.hear(2)
    world.start()
    large, another = asked_by(request("large", images=9))
    world.client.send(Submit(large), Submit(request("after")))
    ready, refused, *_ = world.client.hear(4)
    assert (ready.state, refused.code) == ("ready", "invalid_field")
    assert stages(collector, tracer, caller) == [("queue", "engine_unavailable")]
    assert stages(collector, tracer, another) == [("queue", "invalid_field")]


@traced
def test_a_request_refused_by_the_wheel_or_cancelled_while_it_is_prepared_never_left_the_queue(
    world, collector, tracer
):
    world.start()
    (full, caller), (slow, another) = asked_by(request("full", images=8)), asked_by(request("slow", scheduler="lms"))
    began, go_on = threading.Event(), threading.Event()
    world.executor.turn_s = lambda _plan: began.set() or float(not go_on.wait(WITHIN_S))
    world.client.send(Submit(request("first")), Submit(slow), Cancel("slow"))
    assert began.wait(WITHIN_S)
    world.client.send(Submit(full), Ping())
    cancelled, pong = world.client.hear(2)
    assert (cancelled.request_id, type(pong)) == ("slow", Pong)  # the desk has passed it on
    go_on.set()
    world.executor.compiled.set()
    codes = {message.request_id: getattr(message, "code", None) for message in world.client.hear(3)}
    assert codes == {"first": None, "full": "queue_full"}
    world.client.send(Submit(request("last", scheduler="lms")))  # after the one before it has left the compiler
    world.client.hear(2)
    assert stages(collector, tracer, caller) == [("queue", "queue_full")]
    assert stages(collector, tracer, another) == [("queue", "cancelled")]


@traced
def test_a_request_cancelled_on_the_wheel_shows_how_far_it_came(world, collector, tracer):
    world.start()
    submitted, caller = asked_by(request("a", steps=10_000))
    stepped = threading.Event()

    def turn_s(plan):
        if plan.steps[0].call >= 3:
            stepped.set()
            until(lambda: not world.desk.arrivals.empty())  # it comes no further than this
        return 1.0

    world.executor.turn_s = turn_s
    world.client.send(Submit(submitted))
    assert stepped.wait(WITHIN_S)
    world.client.send(Cancel("a"))
    (failed,) = world.client.hear()
    assert failed.code == "cancelled"
    found = stages(collector, tracer, caller)
    assert sorted(found) == [("denoise", "cancelled"), ("encode", None), ("queue", None)]


@traced
def test_a_request_whose_pixels_are_none_failed_in_its_decoding(world, collector, tracer):
    world.start()
    submitted, caller = asked_by(request("bad", seed=13))
    world.client.send(Submit(submitted), Submit(request("good")))
    world.client.hear(3)
    assert ("decode", "generation_failed") in stages(collector, tracer, caller)
