"""The engine's threads around the wheel: a real channel, a real client's socket, a fake device."""

import math
import threading
import time
import uuid

import msgspec
import pytest
import zmq

from noria.engine import live_view, process
from noria.engine.crash_journal import CrashJournal
from noria.engine.process import Engine
from noria.engine.receiver import RequestReceiver
from noria.engine.runtime import FakeExecutor, VirtualClock
from noria.engine.watchdog import HangWatchdog
from noria.errors import GenerationFailed
from noria.models.catalog import open_model
from noria.observe.traces import otlp
from noria.observe.traces.otlp import OtlpTracer
from noria.observe.traces.trace_context import TraceContext
from noria.observe.traces.tracer import NO_TRACER
from noria.protocol.messages import (
    Cancel,
    EngineLoad,
    EngineState,
    EngineView,
    Failed,
    Finished,
    Hello,
    ImageDone,
    LoadAck,
    Ping,
    Pong,
    Progress,
    Submit,
    ViewRequest,
    deserialize_from_engine,
    serialize,
)
from noria.protocol.request import ImageRequest
from noria.protocol.transport import EngineChannel
from noria.scheduling.step.scheduler import StepScheduler
from waiting import TIMEOUT_S, wait_until

ENDLESS = 100_000
"""Steps of a request that is under way until it is cancelled, however long a busy machine holds up who cancels it."""


def request(request_id="a", steps=3, images=1, seed=7, scheduler="ddim"):
    return ImageRequest(request_id, "a circle", "", seed, 8, 8, steps, 2.0, images, scheduler, math.inf)


def short_iteration_s(_plan):
    """A turn that leaves others the time to do something."""
    return float(not threading.Event().wait(0.01))


class SlowCompileExecutor(FakeExecutor):
    """A fake device on which "lms" takes until `compiled` is set, and seed 13 draws numbers that are none."""

    def __init__(self):
        self.compiled = threading.Event()
        super().__init__(VirtualClock())

    def is_compiled(self, request):
        return request.scheduler != "lms"

    def prepare(self, request):
        if request.scheduler == "lms":
            assert self.compiled.wait(TIMEOUT_S)
        return super().prepare(request)

    def take_pixels(self, image):
        pixels = super().take_pixels(image)
        if pixels.seed == 13:
            return NonFinitePixels()
        if pixels.seed == 14:
            return SlowPixels(pixels)
        return pixels


class SlowPixels:
    """Of a device that works behind the wheel."""

    def __init__(self, pixels):
        self.pixels = pixels

    def rgb(self):
        time.sleep(0.3)
        return self.pixels.rgb()


class NonFinitePixels:
    def rgb(self):
        raise GenerationFailed("not finite")


class Client:
    """A peer with one blocking socket."""

    def __init__(self, address):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.connect(address)
        self.socket.setsockopt(zmq.RCVTIMEO, int(TIMEOUT_S * 1000))

    def send(self, *messages):
        for message in messages:
            self.socket.send(serialize(message))

    def receive(self, count=1, ignored=(Progress, EngineLoad)):
        """The next messages, but for those that come when they like."""
        received = []
        while len(received) < count:
            message = deserialize_from_engine(self.socket.recv_multipart()[0])
            if not isinstance(message, ignored):
                received.append(message)
        return received

    def close(self):
        self.socket.close(0)
        self.context.term()


@pytest.fixture
def tracer(request, collector, monkeypatch):
    """None, unless a test asks for one that brings its spans to the collector, however long that takes."""
    monkeypatch.setattr(otlp, "_CLOSE_WITHIN_S", TIMEOUT_S)
    opened = OtlpTracer(collector.endpoint, 1.0, "engine-0") if getattr(request, "param", None) else NO_TRACER
    yield opened
    opened.close()


traced = pytest.mark.parametrize("tracer", [True], indirect=True)


@pytest.fixture
def harness(tmp_path, bundled_folder, tracer):
    class Harness:
        pass

    harness = Harness()
    address = f"ipc://{tmp_path}/e"
    channel = EngineChannel(address)
    harness.desk = RequestReceiver(
        channel,
        [open_model(str(bundled_folder))],
        "auto",
        watchdog=HangWatchdog(60.0, time.monotonic),
        crash_journal=CrashJournal(tmp_path / "aboard"),
        previous_exit="killed",
        tracer=tracer,
    )
    harness.desk.start()
    harness.executor = SlowCompileExecutor()
    engine = Engine("engine-0", channel, harness.desk, harness.executor, StepScheduler(4, queue_limit=4), tracer)
    loop_thread = threading.Thread(target=engine.run)

    def start():
        harness.desk.open(harness.executor, "cpu", 8)
        loop_thread.start()

    harness.start, harness.client, harness.other = start, Client(address), Client(address)
    yield harness
    harness.executor.compiled.set()
    engine.stop()
    if loop_thread.ident:
        loop_thread.join(TIMEOUT_S)
    harness.client.close()
    harness.other.close()
    channel.close()


def kinds(messages):
    return [type(message) for message in messages]


def test_a_peer_is_told_the_state_and_its_change(harness):
    harness.client.send(Hello("test"), Submit(request()))
    loading, refused = harness.client.hear(2)
    assert (loading.state, loading.models) == ("loading", ())
    assert refused.code == "engine_unavailable"
    harness.start()
    (ready,) = harness.client.hear()
    assert isinstance(ready, EngineState)
    assert (ready.state, ready.device, ready.models[0].name) == ("ready", "cpu", "noria-shapes")


def test_a_ping_is_answered_while_it_loads_while_it_is_idle_and_while_a_turn_lasts(harness):
    harness.client.send(Hello("test"), Ping())
    state, loading = harness.client.hear(2)
    assert (state.previous_end, loading) == ("killed", Pong(state.incarnation, 0.0, 60.0))
    harness.start()
    (ready,) = harness.client.hear()
    harness.client.send(Ping())
    assert harness.client.hear() == [Pong(ready.incarnation, 0.0, 60.0)]
    began, go_on = threading.Event(), threading.Event()
    harness.executor.turn_s = lambda _plan: began.set() or float(not go_on.wait(TIMEOUT_S))
    harness.client.send(Submit(request(steps=1)))
    assert began.wait(TIMEOUT_S)
    harness.client.send(Ping())
    (pong,) = harness.client.hear()
    assert isinstance(pong, Pong)
    assert pong.busy_s > 0
    go_on.set()


def test_who_is_aboard_is_written_before_the_turn_and_told_by_the_next_life(harness, tmp_path):
    harness.start()
    began, go_on = threading.Event(), threading.Event()
    harness.executor.turn_s = lambda _plan: began.set() or float(not go_on.wait(TIMEOUT_S))
    harness.client.send(Submit(request("aboard")))
    assert began.wait(TIMEOUT_S)
    assert CrashJournal(tmp_path / "aboard").previous_in_flight == ("aboard",)
    go_on.set()
    harness.client.send(Hello("test"))
    (state,) = [message for message in harness.client.hear(3) if isinstance(message, EngineState)]
    assert state.in_flight == ()  # at the end of the life before


def test_images_come_before_the_end(harness):
    harness.start()
    harness.client.send(Submit(request(images=2)))
    first, second, end = harness.client.hear(3)
    assert [(first.index, first.seed), (second.index, second.seed)] == [(0, 7), (1, 8)]
    assert isinstance(end, Finished)


def test_a_known_sampler_passes_one_that_is_being_compiled(harness):
    harness.start()
    harness.client.send(Submit(request("slow", scheduler="lms")), Submit(request("quick")))
    assert [message.request_id for message in harness.client.hear(2)] == ["quick", "quick"]
    harness.executor.compiled.set()
    assert [message.request_id for message in harness.client.hear(2)] == ["slow", "slow"]


def test_a_request_cancelled_while_its_sampler_is_compiled_is_never_drawn(harness):
    harness.start()
    harness.client.send(Submit(request("slow", scheduler="lms")), Cancel("slow"))
    (cancelled,) = harness.client.hear()
    assert (cancelled.request_id, cancelled.code) == ("slow", "cancelled")
    harness.executor.compiled.set()
    harness.client.send(Submit(request("next", scheduler="lms")))
    assert [message.request_id for message in harness.client.hear(2)] == ["next", "next"]


def test_an_id_in_use_is_refused_to_whoever_comes_second(harness):
    harness.start()
    began, go_on = threading.Event(), threading.Event()
    harness.executor.turn_s = lambda _plan: began.set() or float(not go_on.wait(TIMEOUT_S))
    harness.client.send(Submit(request("same")))
    assert began.wait(TIMEOUT_S)
    harness.other.send(Submit(request("same", seed=9)), Ping())
    assert kinds(harness.other.hear()) == [Pong]  # the desk has passed it on
    go_on.set()
    (refused,) = harness.other.hear()
    assert (refused.code, refused.field) == ("invalid_field", "request_id")
    image, end = harness.client.hear(2)
    assert (image.request_id, image.seed, type(end)) == ("same", 7, Finished)


def test_more_images_than_can_ever_wait_are_the_callers_mistake(harness):
    harness.start()
    harness.client.send(Submit(request(images=9)))
    (refused,) = harness.client.hear()
    assert (refused.code, refused.field) == ("invalid_field", "n")


def test_an_image_that_is_not_finite_fails_its_request_once_and_no_other(harness):
    harness.start()
    harness.client.send(Submit(request("bad", images=3, seed=12)), Submit(request("good", steps=9)))
    received = harness.client.hear(4)
    bad = [message for message in received if message.request_id == "bad"]
    assert kinds(bad) == [ImageDone, Failed]
    assert (bad[-1].code, bad[-1].message) == ("generation_failed", "not finite")
    assert bad[-1].num_steps_run == 3
    assert bad[-1].timings is not None
    assert kinds(message for message in received if message.request_id == "good") == [ImageDone, Finished]


def test_a_cancelled_request_is_answered(harness):
    harness.start()
    harness.executor.turn_s = short_iteration_s
    harness.client.send(Submit(request("long", steps=ENDLESS)))
    harness.other.send(Cancel("long"))  # not theirs
    harness.client.send(Cancel("long"))
    (cancelled,) = harness.client.hear()
    assert (cancelled.request_id, cancelled.code) == ("long", "cancelled")


def test_what_fails_is_told_with_where_its_time_went(harness):
    harness.start()
    began = threading.Event()
    harness.executor.turn_s = lambda plan: began.set() or short_iteration_s(plan)
    sent = time.monotonic()
    harness.client.send(Submit(request("long", steps=ENDLESS)), Submit(request("along", steps=ENDLESS)))
    assert began.wait(TIMEOUT_S)
    for name in ("long", "along"):
        harness.client.send(Submit(request(f"after-{name}", steps=5)))
        harness.client.hear(2)
        harness.client.send(Cancel(name))
        (cancelled,) = harness.client.hear()
        assert (cancelled.request_id, cancelled.code) == (name, "cancelled")
        assert cancelled.timings.denoise_s > 5 * 0.009 and cancelled.timings.queue_s >= 0
        assert cancelled.timings.queue_s + cancelled.timings.denoise_s < time.monotonic() - sent
        assert cancelled.num_steps_run >= 5
        assert 1 < cancelled.mean_batch <= 3


def test_a_request_is_timed_until_its_pixels_are_there(harness):
    harness.start()
    harness.client.send(Submit(request(seed=14)))
    _, finished = harness.client.hear(2)
    assert finished.timings.encode_s + finished.timings.denoise_s + finished.timings.decode_s >= 0.3
    assert (finished.num_steps_run, finished.mean_batch) == (3, 1.0)


def test_what_never_boarded_is_told_with_how_long_it_waited(harness):
    harness.start()
    harness.client.send(Submit(request("slow", scheduler="lms")), Submit(request("many", images=9)), Cancel("slow"))
    for cancelled in harness.client.hear(2):
        assert cancelled.timings.queue_s > 0
        assert (cancelled.timings.denoise_s, cancelled.num_steps_run) == (0, 0)


def test_the_requests_of_a_front_ends_life_before_leave_when_its_next_one_greets(harness):
    harness.start()
    harness.executor.turn_s = short_iteration_s
    old, new = harness.client, harness.other
    old.send(
        Hello("front"),
        Submit(request("warm", steps=1)),
        *(Submit(request(f"long-{k}", steps=ENDLESS)) for k in range(4)),
    )
    old.send(Submit(request("waits", steps=ENDLESS)), Submit(request("compiled", scheduler="lms")), Ping())
    assert sorted(kind.__name__ for kind in kinds(old.hear(4))) == ["EngineState", "Finished", "ImageDone", "Pong"]
    new.send(Hello("front"))
    assert kinds(new.hear()) == [EngineState]
    cancelled = old.hear(5)
    assert {(message.request_id, message.code) for message in cancelled} == {
        (name, "cancelled") for name in ("long-0", "long-1", "long-2", "long-3", "waits")
    }
    harness.executor.compiled.set()
    new.send(Submit(request("next", scheduler="lms")))
    assert [message.request_id for message in new.hear(2)] == ["next", "next"]
    old.socket.setsockopt(zmq.RCVTIMEO, 100)
    with pytest.raises(zmq.Again):
        old.hear()  # "compiled" was not drawn
    assert len(harness.desk._peers) == 1


def test_a_peer_of_another_name_takes_nobody_out(harness):
    harness.start()
    harness.client.send(Hello("one"), Submit(request("slow", scheduler="lms")), Submit(request("quick", steps=50)))
    harness.client.hear()
    harness.other.send(Hello("two"))
    harness.other.hear()
    harness.executor.compiled.set()
    assert {message.request_id for message in harness.client.hear(4)} == {"slow", "quick"}


def test_a_peer_that_does_not_read_gets_one_load_and_all_its_answers(harness, monkeypatch):
    monkeypatch.setattr(process, "_BETWEEN_LOADS_S", 0.0)  # one after every turn
    harness.start()
    silent, reader = harness.client, harness.other
    silent.send(Submit(request("first", steps=1)))
    silent.hear(2)  # from now on it has a load to tell
    for name, client in (("silent", silent), ("reader", reader)):
        client.send(Hello(name))
        assert kinds(client.hear(2, unheard=())) == [EngineState, EngineLoad]
    go_on, loads = threading.Semaphore(0), []
    harness.executor.turn_s = lambda _plan: float(go_on.acquire(timeout=TIMEOUT_S))
    silent.send(Submit(request("busy", steps=4)))
    for _ in range(4):
        reader.send(LoadAck())
        go_on.release()
        loads += reader.hear(unheard=())
    assert [load.num_seated for load in loads] == [1, 1, 1, 0]
    assert kinds(silent.hear(3, unheard=())) == [Progress, ImageDone, Finished]
    silent.send(LoadAck())
    assert silent.hear(unheard=()) == loads[-1:]  # the newest, and none of those between
    silent.send(LoadAck(), Ping())
    assert kinds(silent.hear(unheard=())) == [Pong]


def test_a_follow_of_an_idle_wheel_is_answered_and_the_next_one_when_somebody_comes(harness):
    harness.client.send(Hello("page"), ViewRequest(None, with_thumbnails=True))
    (loading,) = harness.client.hear()
    assert loading.state == "loading"
    harness.start()
    view, ready = sorted(harness.client.hear(2), key=lambda message: isinstance(message, EngineState))
    assert (view.incarnation, view.number, view.num_slots) == (ready.incarnation, 0, 4)
    harness.client.send(ViewRequest(0, with_thumbnails=True), Ping())
    assert kinds(harness.client.hear()) == [Pong]  # there is nothing new
    harness.executor.turn_s = short_iteration_s
    harness.other.send(Submit(request("one.f00d", steps=ENDLESS, images=2)))
    slots, calls, num_thumbnails = set(), [], 0
    while len(calls) < 4 or num_thumbnails < 2:
        (view,) = harness.client.hear()
        slots |= {(slot.request_id, slot.index) for slot in view.seats}
        calls += [view.seats[0].call] if view.seats else []
        num_thumbnails = max(num_thumbnails, len(view.cells))
        harness.client.send(ViewRequest(view.number, with_thumbnails=True))
    assert slots == {("one", 0), ("one", 1)}
    assert calls == sorted(set(calls))
    assert num_thumbnails == 2


def test_after_every_slow_turn_who_follows_sees_it_with_its_pictures(harness, monkeypatch):
    monkeypatch.setattr(live_view, "MOST_BETWEEN_VIEWS_S", live_view.VIEW_INTERVAL_S)  # however busy this machine is

    def slow(_plan):
        """As any turn that lasts: the next view is asked for meanwhile."""
        threading.Event().wait(live_view.VIEW_INTERVAL_S + 0.05)
        return float(wait_until(lambda: not harness.desk.arrivals.empty()))

    harness.executor.turn_s = slow
    harness.start()
    harness.client.send(Submit(request(steps=6)), ViewRequest(None, with_thumbnails=True))
    views = []
    while not views or views[-1].number < 5:
        views += harness.client.hear()
        harness.client.send(ViewRequest(views[-1].number, with_thumbnails=True))
    numbered = [view for view in views if view.number]
    assert [view.number for view in numbered] == [1, 2, 3, 4, 5]
    assert [view.seats[0].call for view in numbered] == [1, 2, 3, 4, 5]
    assert [len(view.cells) for view in numbered[1:]] == [
        1,
        1,
        1,
        1,
    ]  # the first may have begun before anybody followed


def test_the_pictures_of_a_view_are_the_frame_beside_it(harness):
    harness.start()
    harness.executor.turn_s = short_iteration_s
    harness.other.send(Submit(request("one", steps=ENDLESS, seed=9)))
    view, last_iteration = None, None
    while view is None or not view.thumbnails:
        harness.client.send(ViewRequest(last_iteration, with_thumbnails=True))
        while not isinstance(
            view := deserialize_from_engine((frames := harness.client.socket.recv_multipart())[0]), EngineView
        ):
            pass
        last_iteration = view.last_iteration
    (thumbnail,) = view.thumbnails
    assert (thumbnail.request_id, thumbnail.width_px, thumbnail.height_px, thumbnail.offset, frames[1]) == (
        "one",
        1,
        1,
        0,
        bytes([9] * 3),
    )


def test_a_front_end_that_greets_anew_is_shown_nothing_that_its_life_before_asked_for(harness):
    harness.start()
    harness.client.send(Hello("front"), ViewRequest(None, with_thumbnails=False))
    assert EngineView in kinds(harness.client.hear(2))
    harness.client.send(ViewRequest(0, with_thumbnails=False), Ping())
    assert kinds(harness.client.hear()) == [Pong]  # so the desk has read what was before it
    harness.other.send(Hello("front"), Submit(request("quick", steps=1)))
    assert Finished in kinds(harness.other.hear(3))
    harness.client.send(Ping())
    assert kinds(harness.client.hear()) == [Pong]


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
def test_a_request_that_was_drawn_has_all_its_stages(harness, collector, tracer):
    harness.start()
    submitted, caller = asked_by(request("an-id.0a1b"))
    harness.client.send(Submit(submitted))
    harness.client.hear(2)
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
def test_a_request_that_nobody_records_has_none(harness, collector, tracer):
    harness.start()
    submitted, caller = asked_by(request(), is_sampled=False)
    harness.client.send(Submit(submitted), Submit(request("untraced")))
    harness.client.hear(4)
    assert stages(collector, tracer, caller) == []


@traced
def test_a_request_refused_by_the_desk_waited_for_nothing(harness, collector, tracer):
    early, caller = asked_by(request("early"))
    harness.client.send(Hello("test"), Submit(early))
    harness.client.hear(2)
    harness.start()
    large, another = asked_by(request("large", images=9))
    harness.client.send(Submit(large), Submit(request("after")))
    ready, refused, *_ = harness.client.hear(4)
    assert (ready.state, refused.code) == ("ready", "invalid_field")
    assert stages(collector, tracer, caller) == [("queue", "engine_unavailable")]
    assert stages(collector, tracer, another) == [("queue", "invalid_field")]


@traced
def test_a_request_refused_by_the_wheel_or_cancelled_while_it_is_prepared_never_left_the_queue(
    harness, collector, tracer
):
    harness.start()
    (full, caller), (slow, another) = asked_by(request("full", images=8)), asked_by(request("slow", scheduler="lms"))
    began, go_on = threading.Event(), threading.Event()
    harness.executor.turn_s = lambda _plan: began.set() or float(not go_on.wait(TIMEOUT_S))
    harness.client.send(Submit(request("first")), Submit(slow), Cancel("slow"))
    assert began.wait(TIMEOUT_S)
    harness.client.send(Submit(full), Ping())
    cancelled, pong = harness.client.hear(2)
    assert (cancelled.request_id, type(pong)) == ("slow", Pong)  # the desk has passed it on
    go_on.set()
    harness.executor.compiled.set()
    codes = {message.request_id: getattr(message, "code", None) for message in harness.client.hear(3)}
    assert codes == {"first": None, "full": "queue_full"}
    harness.client.send(Submit(request("last", scheduler="lms")))  # after the one before it has left the compiler
    harness.client.hear(2)
    assert stages(collector, tracer, caller) == [("queue", "queue_full")]
    assert stages(collector, tracer, another) == [("queue", "cancelled")]


@traced
def test_a_request_cancelled_on_the_wheel_shows_how_far_it_came(harness, collector, tracer):
    harness.start()
    submitted, caller = asked_by(request("a", steps=10_000))
    stepped = threading.Event()

    def iteration_s(plan):
        if plan.steps[0].call >= 3:
            stepped.set()
            wait_until(lambda: not harness.desk.arrivals.empty())  # it comes no further than this
        return 1.0

    harness.executor.turn_s = iteration_s
    harness.client.send(Submit(submitted))
    assert stepped.wait(TIMEOUT_S)
    harness.client.send(Cancel("a"))
    (failed,) = harness.client.hear()
    assert failed.code == "cancelled"
    found = stages(collector, tracer, caller)
    assert sorted(found) == [("denoise", "cancelled"), ("encode", None), ("queue", None)]


@traced
def test_a_request_whose_pixels_are_none_failed_in_its_decoding(harness, collector, tracer):
    harness.start()
    submitted, caller = asked_by(request("bad", seed=13))
    harness.client.send(Submit(submitted), Submit(request("good")))
    harness.client.hear(3)
    assert ("decode", "generation_failed") in stages(collector, tracer, caller)
