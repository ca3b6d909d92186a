"""The engine's threads around the loop, with a real channel, a real client socket and a fake device."""

import threading
import time
import uuid
from dataclasses import replace
from types import SimpleNamespace

import msgspec
import pytest
import zmq

from noria.engine import engines as engine_module
from noria.engine.live import publisher
from noria.engine.monitoring.crash_journal import CrashJournal
from noria.engine.runtime import StepRuntime
from noria.errors import GenerationFailed, InvalidField
from noria.models.catalog import open_model
from noria.observe.traces.otlp import open_otlp_provider
from noria.observe.traces.tracer import GLOBAL_TRACER
from noria.protocol.messages import (
    Cancel,
    EngineLoad,
    EngineState,
    EngineView,
    Failed,
    Finished,
    HandedOver,
    Hello,
    ImageDone,
    ImageState,
    Leave,
    LoadAck,
    Ping,
    Pong,
    Progress,
    Release,
    Resume,
    StateRefused,
    ViewRequest,
    deserialize_from_engine,
    serialize,
)
from noria.scheduling.step.scheduler import StepScheduler
from noria.testing.fake_executor import FakeExecutor
from noria.testing.requests import make_image_request
from noria.testing.virtual_clock import VirtualClock
from running_engine import RunningEngine
from waiting import TIMEOUT_S, wait_until

ENDLESS = 100_000
"""Steps of a request that runs until it is cancelled, however slow the machine is."""


def request(request_id="a", steps=3, images=1, seed=7, scheduler="ddim"):
    return make_image_request(
        request_id, "noria-shapes", inference_steps=steps, n=images, seed=seed, scheduler=scheduler
    )


def short_iteration_s(_plan):
    """An iteration that gives other threads time to run."""
    return float(not threading.Event().wait(0.01))


class PanicError(BaseException):
    """An error such as a panic in Rust: it is no Exception."""


class SlowCompileExecutor(FakeExecutor):
    """A fake device: compiling "lms" blocks until `compiled` is set.

    Seed 13 gives pixels that are not finite, seed 14 slow ones.
    """

    def __init__(self):
        self.compiled = threading.Event()
        super().__init__(VirtualClock())

    def is_compiled(self, request):
        return request.payload.scheduler != "lms"

    def prepare(self, request, data=None):
        self.data = data
        match request.payload.scheduler:
            case "lms":
                assert self.compiled.wait(TIMEOUT_S)
            case "unsupported":
                raise InvalidField("unsupported", field="scheduler")
            case "broken":
                raise ZeroDivisionError
            case "panicking":
                raise PanicError
        return super().prepare(request, data)

    def take_result(self, image):
        result = super().take_result(image)
        if result.pixels.seed == 13:
            return replace(result, pixels=NonFinitePixels())
        if result.pixels.seed == 14:
            return replace(result, pixels=SlowPixels(result.pixels))
        return result


class SlowPixels:
    """Pixels of a device that runs behind the loop."""

    def __init__(self, pixels):
        self.pixels = pixels

    def rgb(self):
        time.sleep(0.3)
        return self.pixels.rgb()


class NonFinitePixels:
    def rgb(self):
        raise GenerationFailed("not finite")


@pytest.fixture
def tracer(request, collector):
    """A tracer that records nothing, unless a test asks for one that exports to the collector."""
    if not hasattr(request, "param"):
        yield GLOBAL_TRACER
        return
    provider = open_otlp_provider(collector.endpoint, 1.0, "engine-0")
    yield provider.get_tracer("noria")
    provider.shutdown()


traced = pytest.mark.parametrize("tracer", [True], indirect=True)


class Harness(RunningEngine):
    """An engine with a fake device, which loads until `start`, and two clients."""

    def __init__(self, folder, spec, tracer):
        super().__init__(folder, [spec], previous_exit="killed", tracer=tracer)
        self.executor, self.num_running_when_idle = SlowCompileExecutor(), []
        self.client, self.other = self.connect(), self.connect()

    def start(self):
        scheduler = StepScheduler(4, queue_limit=4)

        def on_idle():
            self.num_running_when_idle.append(scheduler.num_running + scheduler.num_waiting)

        super().start(StepRuntime(self.executor, scheduler, on_idle=on_idle))


@pytest.fixture
def harness(tmp_path, bundled_folder, tracer):
    made = Harness(tmp_path, open_model(str(bundled_folder)), tracer)
    yield made
    made.executor.compiled.set()
    made.close()


def kinds(messages):
    return [type(message) for message in messages]


def test_a_client_gets_the_state_and_its_changes(harness):
    harness.client.send(Hello("test"), request())
    loading, rejected = harness.client.receive(2)
    assert (loading.state, loading.models) == ("loading", ())
    assert rejected.code == "engine_unavailable"
    harness.start()
    (ready,) = harness.client.receive()
    assert isinstance(ready, EngineState)
    assert (ready.state, ready.device, ready.models[0].name) == ("ready", "cpu", "noria-shapes")


def test_the_runtime_learns_when_the_engine_is_idle(harness):
    harness.start()
    harness.client.send(request(images=6))
    harness.client.receive(7)
    wait_until(lambda: harness.num_running_when_idle)
    assert set(harness.num_running_when_idle) == {0}


def test_a_ping_is_answered_while_loading_while_idle_and_during_an_iteration(harness):
    harness.client.send(Hello("test"), Ping())
    state, loading = harness.client.receive(2)
    assert (state.previous_exit, loading) == ("killed", Pong(state.incarnation, 0.0, 60.0))
    harness.start()
    (ready,) = harness.client.receive()
    harness.client.send(Ping())
    assert harness.client.receive() == [Pong(ready.incarnation, 0.0, 60.0)]
    began, go_on = threading.Event(), threading.Event()
    harness.executor.iteration_s = lambda _plan: began.set() or float(not go_on.wait(TIMEOUT_S))
    harness.client.send(request(steps=1))
    assert began.wait(TIMEOUT_S)
    harness.client.send(Ping())
    (pong,) = harness.client.receive()
    assert isinstance(pong, Pong)
    assert pong.busy_s > 0
    go_on.set()


def test_requests_in_flight_are_written_before_the_iteration_and_sent_by_the_next_process(harness):
    harness.start()
    began, go_on = threading.Event(), threading.Event()
    harness.executor.iteration_s = lambda _plan: began.set() or float(not go_on.wait(TIMEOUT_S))
    harness.client.send(request("a"))
    assert began.wait(TIMEOUT_S)
    assert CrashJournal(harness.journal).previous_in_flight == ("a",)
    go_on.set()
    harness.client.send(Hello("test"))
    (state,) = [message for message in harness.client.receive(3) if isinstance(message, EngineState)]
    assert state.in_flight == ()  # when the previous process ended


def version_of(harness):
    return harness.receiver.models[0].fingerprint


def test_an_engine_that_leaves_serves_what_it_has_until_that_is_released(harness):
    harness.start()
    harness.executor.iteration_s = short_iteration_s
    harness.client.send(Hello("test"), request("a", steps=ENDLESS, images=2), request("b", steps=2))
    harness.client.receive()
    harness.client.send(Leave(), Leave())
    state, *finished = sorted(harness.client.receive(3), key=lambda message: not isinstance(message, EngineState))
    assert state.state == "draining"
    assert {message.attempt_id for message in finished} == {"b"}
    harness.client.send(Release("a"), Release("b"), Release("unknown"), Ping())
    moved, _ = sorted(harness.client.receive(2), key=lambda message: isinstance(message, Pong))
    assert isinstance(moved, HandedOver)
    assert (moved.attempt_id, moved.model_version) == ("a", version_of(harness))
    assert [image.index for image in moved.images] == [0, 1]
    assert all(0 < image.call < ENDLESS for image in moved.images)
    assert moved.timings.queue_s + moved.timings.denoise_s > 0
    assert not harness.executor._accepted


def test_a_request_goes_on_at_the_calls_of_another_engine(harness):
    harness.start()
    calls = []
    harness.executor.iteration_s = lambda plan: float(bool(calls.extend((s.image.index, s.call) for s in plan.steps)))
    states = (ImageState(1, 2, batch_size_sum=6), ImageState(2, 3, batch_size_sum=9))
    message = Resume(request("a", steps=4, images=4), states, done=(3,), model_version=version_of(harness))
    harness.client.send(message)
    messages = harness.client.receive(5, ignored=(EngineLoad,))
    assert (messages[0].call, messages[0].num_calls) == (0, 4)
    assert sorted(each.index for each in messages[1:4]) == [0, 1, 2]
    assert isinstance(messages[-1], Finished)
    assert sorted(calls) == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model_version": "another"}, "are of version 'another'"),
        ({"images": (ImageState(0, 4, 4),)}, "no such call"),
        ({"images": (ImageState(0, 1, 1, num_bytes=1),)}, "1 bytes, and 0 are left"),
    ],
)
def test_states_that_cannot_be_used_are_refused(harness, fields, reason):
    harness.start()
    settings = {"images": (ImageState(0, 1, 1),), "model_version": version_of(harness)}
    message = Resume(request("a", steps=3), **settings | fields)
    harness.client.send(message)
    (refused,) = harness.client.receive()
    assert isinstance(refused, StateRefused)
    assert reason in refused.message
    harness.client.send(message.request)
    assert kinds(harness.client.receive(2)) == [ImageDone, Finished]


def test_a_request_that_comes_for_a_model_that_has_left_meanwhile_is_handed_over_again(harness):
    harness.start()
    message = Resume(msgspec.structs.replace(request("a"), model_version="another"), (ImageState(0, 1, 1),))
    harness.client.send(message)
    (moved,) = harness.client.receive()
    assert (type(moved), moved.attempt_id, moved.images) == (HandedOver, "a", ())


def test_a_request_that_is_being_prepared_is_released_at_once(harness):
    harness.start()
    harness.client.send(request("a", scheduler="lms"), Release("a"))
    (moved,) = harness.client.receive()
    assert (moved.attempt_id, moved.images) == ("a", ())
    harness.executor.compiled.set()


def test_an_engine_that_is_stopped_hands_over_what_it_has(harness):
    harness.start()
    harness.executor.iteration_s = short_iteration_s
    harness.client.send(Hello("test"), request("c", scheduler="lms"))  # which is never compiled
    harness.client.send(request("a", steps=ENDLESS), request("b", steps=ENDLESS))
    ready, *_ = harness.client.receive(3, ignored=(EngineLoad,))
    assert ready.state == "ready"
    harness.stop()
    state, *moved = harness.client.receive(4)
    assert state.state == "draining"
    assert {message.attempt_id for message in moved} == {"a", "b", "c"}


def test_a_request_with_a_known_sampler_does_not_wait_for_a_compilation(harness):
    harness.start()
    harness.client.send(request("slow", scheduler="lms"), request("quick"))
    assert [message.attempt_id for message in harness.client.receive(2)] == ["quick", "quick"]
    harness.executor.compiled.set()
    assert [message.attempt_id for message in harness.client.receive(2)] == ["slow", "slow"]


def test_a_request_cancelled_during_compilation_is_never_generated(harness):
    harness.start()
    harness.client.send(request("slow", scheduler="lms"), Cancel("slow"))
    (cancelled,) = harness.client.receive()
    assert (cancelled.attempt_id, cancelled.code) == ("slow", "cancelled")
    harness.executor.compiled.set()
    harness.client.send(request("next", scheduler="lms"))
    assert [message.attempt_id for message in harness.client.receive(2)] == ["next", "next"]


def test_a_second_request_with_an_id_in_use_is_rejected(harness):
    harness.start()
    began, go_on = threading.Event(), threading.Event()
    harness.executor.iteration_s = lambda _plan: began.set() or float(not go_on.wait(TIMEOUT_S))
    harness.client.send(request("same"))
    assert began.wait(TIMEOUT_S)
    harness.other.send(request("same", seed=9), Ping())
    assert kinds(harness.other.receive()) == [Pong]  # the receiver has passed the request on
    go_on.set()
    (rejected,) = harness.other.receive()
    assert (rejected.code, rejected.field) == ("invalid_field", "attempt_id")
    image, end = harness.client.receive(2)
    assert (image.attempt_id, image.seed, type(end)) == ("same", 7, Finished)


@pytest.mark.parametrize("other", [{"model": "another"}, {"model_version": "another"}])
def test_a_request_for_a_model_that_the_engine_does_not_hold_is_rejected(harness, other):
    harness.start()
    harness.client.send(msgspec.structs.replace(request(), **other))
    (rejected,) = harness.client.receive()
    assert (rejected.code, rejected.attempt_id) == ("engine_unavailable", "a")


@pytest.mark.parametrize(
    ("scheduler", "code", "field"),
    [
        ("unsupported", "invalid_field", "scheduler"),
        ("broken", "generation_failed", None),
        ("panicking", "generation_failed", None),
    ],
)
def test_a_request_that_cannot_be_prepared_fails_alone(harness, scheduler, code, field, caplog):
    harness.start()
    bad = msgspec.structs.replace(request("bad", scheduler=scheduler), client="alice")
    harness.client.send(bad, request("good"))
    failed, *rest = harness.client.receive(3)
    assert (failed.attempt_id, failed.code, failed.field) == ("bad", code, field)
    assert kinds(rest) == [ImageDone, Finished]
    errors = [record.noria_fields for record in caplog.records if record.levelname == "ERROR"]
    assert [(each["request_id"], each["key"]) for each in errors] == ([("bad", "alice")] if field is None else [])


def test_the_frame_beside_a_request_reaches_the_executor(harness):
    harness.start()
    harness.client.socket.send_multipart([serialize(request()), b"pixels"])
    harness.client.receive(2)
    assert harness.executor.data == b"pixels"


def test_an_image_that_is_not_finite_fails_its_own_request_once(harness):
    harness.start()
    harness.client.send(request("bad", images=3, seed=12), request("good", steps=9))
    received = harness.client.receive(4)
    bad = [message for message in received if message.attempt_id == "bad"]
    assert kinds(bad) == [ImageDone, Failed]
    assert (bad[-1].code, bad[-1].message) == ("generation_failed", "not finite")
    assert bad[-1].num_steps_run == 3
    assert bad[-1].timings is not None
    assert kinds(message for message in received if message.attempt_id == "good") == [ImageDone, Finished]


def test_a_failed_request_has_its_timings_and_its_steps(harness):
    harness.start()
    began = threading.Event()
    harness.executor.iteration_s = lambda plan: began.set() or short_iteration_s(plan)
    sent = time.monotonic()
    harness.client.send(request("long", steps=ENDLESS), request("along", steps=ENDLESS))
    assert began.wait(TIMEOUT_S)
    for name in ("long", "along"):
        harness.client.send(request(f"after-{name}", steps=5))
        harness.client.receive(2)
        harness.client.send(Cancel(name))
        (cancelled,) = harness.client.receive()
        assert (cancelled.attempt_id, cancelled.code) == (name, "cancelled")
        assert cancelled.timings.denoise_s > 5 * 0.009 and cancelled.timings.queue_s >= 0
        assert cancelled.timings.queue_s + cancelled.timings.denoise_s < time.monotonic() - sent
        assert cancelled.num_steps_run >= 5
        assert 1 < cancelled.mean_batch <= 3


def test_a_request_is_timed_until_its_pixels_arrive(harness):
    harness.start()
    harness.client.send(request(seed=14))
    _, finished = harness.client.receive(2)
    assert finished.timings.text_encode_s + finished.timings.denoise_s + finished.timings.decode_s >= 0.3
    assert (finished.num_steps_run, finished.mean_batch) == (3, 1.0)


def test_a_request_that_never_joined_has_its_queue_time(harness):
    harness.start()
    harness.client.send(request("slow", scheduler="lms"), request("many", images=9), Cancel("slow"))
    for cancelled in harness.client.receive(2):
        assert cancelled.timings.queue_s > 0
        assert (cancelled.timings.denoise_s, cancelled.num_steps_run) == (0, 0)


def test_a_reconnecting_front_end_cancels_the_requests_of_its_previous_process(harness):
    harness.start()
    harness.executor.iteration_s = short_iteration_s
    old, new = harness.client, harness.other
    old.send(Hello("front"), request("warm", steps=1), *(request(f"long-{k}", steps=ENDLESS) for k in range(4)))
    old.send(request("waits", steps=ENDLESS), request("compiled", scheduler="lms"), Ping())
    assert sorted(kind.__name__ for kind in kinds(old.receive(4))) == ["EngineState", "Finished", "ImageDone", "Pong"]
    new.send(Hello("front"))
    assert kinds(new.receive()) == [EngineState]
    cancelled = old.receive(5)
    assert {(message.attempt_id, message.code) for message in cancelled} == {
        (name, "cancelled") for name in ("long-0", "long-1", "long-2", "long-3", "waits")
    }
    harness.executor.compiled.set()
    new.send(request("next", scheduler="lms"))
    assert [message.attempt_id for message in new.receive(2)] == ["next", "next"]
    old.socket.setsockopt(zmq.RCVTIMEO, 100)
    with pytest.raises(zmq.Again):
        old.receive()  # "compiled" was not generated
    assert len(harness.receiver._clients) == 1


def test_a_client_that_falls_silent_loses_its_requests_when_its_lease_ends(harness):
    harness.start()
    harness.executor.iteration_s = short_iteration_s
    silent, pinging = harness.client, harness.other
    for client, attempt_id in ((silent, "silent"), (pinging, "pinging")):
        client.send(Hello(attempt_id, lease_s=0.5), request(attempt_id, steps=ENDLESS))
        assert kinds(client.receive()) == [EngineState]

    def is_forgotten():
        pinging.send(Ping())
        pinging.receive()
        return list(harness.receiver._clients) == ["pinging"]

    wait_until(is_forgotten)
    assert [(message.attempt_id, message.code) for message in silent.receive()] == [("silent", "cancelled")]
    pinging.send(Cancel("pinging"))
    assert [(message.attempt_id, message.code) for message in pinging.receive()] == [("pinging", "cancelled")]


def test_a_client_of_another_name_cancels_nothing(harness):
    harness.start()
    harness.client.send(Hello("one"), request("slow", scheduler="lms"), request("quick", steps=50))
    harness.client.receive()
    harness.other.send(Hello("two"))
    harness.other.receive()
    harness.executor.compiled.set()
    assert {message.attempt_id for message in harness.client.receive(4)} == {"slow", "quick"}


def test_a_client_that_does_not_acknowledge_gets_one_load_and_all_its_answers(harness, monkeypatch):
    monkeypatch.setattr(engine_module, "LOAD_INTERVAL_S", 0.0)  # a load before every iteration
    harness.start()
    silent, reader = harness.client, harness.other
    silent.send(request("first", steps=1))
    silent.receive(2)  # from now on there is a load to send
    for name, client in (("silent", silent), ("reader", reader)):
        client.send(Hello(name))
        assert kinds(client.receive(2, ignored=())) == [EngineState, EngineLoad]
    go_on, loads = threading.Semaphore(0), []
    harness.executor.iteration_s = lambda _plan: float(go_on.acquire(timeout=TIMEOUT_S))
    reader.send(LoadAck())
    silent.send(request("busy", steps=4))
    loads += reader.receive(ignored=())
    for _ in range(4):
        reader.send(LoadAck())
        go_on.release()
        loads += reader.receive(ignored=())
    assert [(load.num_running, load.num_waiting) for load in loads] == [(0, 1), (1, 0), (1, 0), (1, 0), (0, 0)]
    assert kinds(silent.receive(3, ignored=())) == [Progress, ImageDone, Finished]
    silent.send(LoadAck())
    assert silent.receive(ignored=()) == loads[-1:]  # the newest one only
    silent.send(LoadAck(), Ping())
    assert kinds(silent.receive(ignored=())) == [Pong]


def test_a_load_counts_the_requests_that_came_during_an_iteration(harness, monkeypatch):
    monkeypatch.setattr(engine_module, "LOAD_INTERVAL_S", 0.0)
    harness.start()
    iterations, go_on, loads = threading.Semaphore(0), threading.Semaphore(0), []

    def iteration_s(_plan):
        iterations.release()
        return float(go_on.acquire(timeout=TIMEOUT_S))

    def read_loads():
        """Read and acknowledge the loads that were sent until now."""
        harness.client.send(Ping())
        while not isinstance(message := harness.client.receive(ignored=())[0], Pong):
            if isinstance(message, EngineLoad):
                loads.append(message.num_running + message.num_waiting)
                harness.client.send(LoadAck())

    harness.executor.iteration_s = iteration_s
    harness.client.send(Hello("test"), request("a"))
    assert iterations.acquire(timeout=TIMEOUT_S)
    harness.client.send(request("b"))
    read_loads()
    go_on.release()
    assert iterations.acquire(timeout=TIMEOUT_S)
    read_loads()
    read_loads()
    assert loads[-1] == 2
    go_on.release(4)


def test_the_first_view_of_an_idle_engine_comes_at_once_and_the_next_with_a_request(harness):
    harness.client.send(Hello("page"), ViewRequest(None, with_thumbnails=True))
    (loading,) = harness.client.receive()
    assert loading.state == "loading"
    harness.start()
    view, ready = sorted(harness.client.receive(2), key=lambda message: isinstance(message, EngineState))
    assert (view.incarnation, view.last_iteration, view.num_slots) == (ready.incarnation, 0, 4)
    harness.client.send(ViewRequest(0, with_thumbnails=True), Ping())
    assert kinds(harness.client.receive()) == [Pong]  # nothing has changed
    harness.executor.iteration_s = short_iteration_s
    harness.other.send(request("one", steps=ENDLESS, images=2))
    slots, calls, num_thumbnails = set(), [], 0
    while len(calls) < 4 or num_thumbnails < 2:
        (view,) = harness.client.receive()
        slots |= {(slot.request_id, slot.index) for slot in view.slots}
        calls += [view.slots[0].call] if view.slots else []
        num_thumbnails = max(num_thumbnails, len(view.thumbnails))
        harness.client.send(ViewRequest(view.last_iteration, with_thumbnails=True))
    assert slots == {("one", 0), ("one", 1)}
    assert calls == sorted(set(calls))
    assert num_thumbnails == 2


def test_a_subscriber_sees_every_slow_iteration_with_thumbnails(harness, monkeypatch):
    monkeypatch.setattr(publisher, "MAX_VIEW_INTERVAL_S", publisher.VIEW_INTERVAL_S)  # even on a busy machine

    def slow(_plan):
        """A long iteration, during which the next view is requested."""
        threading.Event().wait(publisher.VIEW_INTERVAL_S + 0.05)
        return float(wait_until(lambda: not harness.receiver.commands.empty()))

    harness.executor.iteration_s = slow
    harness.start()
    harness.client.send(request(steps=6), ViewRequest(None, with_thumbnails=True))
    views = []
    while not views or views[-1].last_iteration < 5:
        views += harness.client.receive()
        harness.client.send(ViewRequest(views[-1].last_iteration, with_thumbnails=True))
    numbered = [view for view in views if view.last_iteration]
    assert [view.last_iteration for view in numbered] == [1, 2, 3, 4, 5]
    assert [view.slots[0].call for view in numbered] == [1, 2, 3, 4, 5]
    # The first iteration may have begun before the subscription.
    assert [len(view.thumbnails) for view in numbered[1:]] == [1] * 4


def test_the_thumbnails_of_a_view_are_in_the_frame_beside_it(harness):
    harness.start()
    harness.executor.iteration_s = short_iteration_s
    harness.other.send(request("one", steps=ENDLESS, seed=9))
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


def test_a_reconnecting_front_end_gets_no_view_that_its_previous_process_asked_for(harness):
    harness.start()
    harness.client.send(Hello("front"), ViewRequest(None, with_thumbnails=False))
    assert EngineView in kinds(harness.client.receive(2))
    harness.client.send(ViewRequest(0, with_thumbnails=False), Ping())
    assert kinds(harness.client.receive()) == [Pong]  # so the receiver has read the view request
    harness.other.send(Hello("front"), request("quick", steps=1))
    assert Finished in kinds(harness.other.receive(3))
    harness.client.send(Ping())
    assert kinds(harness.client.receive()) == [Pong]


def traced_request(submitted, *, is_sampled=True):
    """The request as part of a trace, and its trace context."""
    caller = SimpleNamespace(trace_id=uuid.uuid4().hex, span_id=uuid.uuid4().hex[:16])
    traceparent = f"00-{caller.trace_id}-{caller.span_id}-0{int(is_sampled)}"
    return msgspec.structs.replace(submitted, traceparent=traceparent, tracestate="vendor=x"), caller


def stages(collector, tracer, caller):
    """The stages in the trace, in order: name and error type."""
    tracer.span_processor.force_flush()
    spans = sorted(collector.of_trace(caller.trace_id), key=lambda span: (span.began, span.ended))
    assert {(span.parent_id, span.tracestate) for span in spans} <= {(caller.span_id, "vendor=x")}
    assert all(span.failed == ("error.type" in span.attributes) for span in spans)
    return [(span.name, span.attributes.get("error.type")) for span in spans]


@traced
def test_a_generated_request_has_spans_of_all_stages(harness, collector, tracer):
    harness.start()
    submitted, caller = traced_request(msgspec.structs.replace(request("an-id"), attempt_id="an-id.0a1b"))
    harness.client.send(submitted)
    harness.client.receive(2)
    found = stages(collector, tracer, caller)
    assert sorted(name for name, why in found if why is None) == ["decode", "denoise", "queue", "text_encode"]
    (denoise,) = [span for span in collector.of_trace(caller.trace_id) if span.name == "denoise"]
    assert denoise.attributes == {
        "noria.request_id": "an-id",
        "gen_ai.request.model": "noria-shapes",
        "noria.inference_steps": 3,
        "noria.scheduler": "ddim",
        "noria.mean_batch": 1.0,
        "noria.slots": 4,
    }


@traced
def test_a_request_that_is_not_sampled_has_no_spans(harness, collector, tracer):
    harness.start()
    submitted, caller = traced_request(request(), is_sampled=False)
    harness.client.send(submitted, request("untraced"))
    harness.client.receive(4)
    assert stages(collector, tracer, caller) == []


@traced
def test_a_request_rejected_by_the_receiver_has_a_failed_queue_span(harness, collector, tracer):
    early, caller = traced_request(request("early"))
    harness.client.send(Hello("test"), early)
    harness.client.receive(2)
    harness.start()
    unknown, another = traced_request(msgspec.structs.replace(request("unknown"), model="another"))
    harness.client.send(unknown, request("after"))
    ready, rejected, *_ = harness.client.receive(4)
    assert (ready.state, rejected.code) == ("ready", "engine_unavailable")
    assert stages(collector, tracer, caller) == stages(collector, tracer, another) == [("queue", "engine_unavailable")]


@traced
def test_a_request_rejected_by_the_scheduler_or_cancelled_in_preparation_has_only_a_queue_span(
    harness, collector, tracer
):
    harness.start()
    (full, caller), (slow, another) = (
        traced_request(request("full", images=8)),
        traced_request(request("slow", scheduler="lms")),
    )
    began, go_on = threading.Event(), threading.Event()
    harness.executor.iteration_s = lambda _plan: began.set() or float(not go_on.wait(TIMEOUT_S))
    harness.client.send(request("first"), slow, Cancel("slow"))
    assert began.wait(TIMEOUT_S)
    harness.client.send(full, Ping())
    cancelled, pong = harness.client.receive(2)
    assert (cancelled.attempt_id, type(pong)) == ("slow", Pong)  # the receiver has passed the request on
    go_on.set()
    harness.executor.compiled.set()
    codes = {message.attempt_id: getattr(message, "code", None) for message in harness.client.receive(3)}
    assert codes == {"first": None, "full": "queue_full"}
    harness.client.send(request("last", scheduler="lms"))  # so that the compiler has finished the one before
    harness.client.receive(2)
    assert stages(collector, tracer, caller) == [("queue", "queue_full")]
    assert stages(collector, tracer, another) == [("queue", "cancelled")]


@traced
def test_a_request_cancelled_while_running_has_spans_up_to_denoising(harness, collector, tracer):
    harness.start()
    submitted, caller = traced_request(request("a", steps=10_000))
    stepped = threading.Event()

    def iteration_s(plan):
        if plan.steps[0].call >= 3:
            stepped.set()
            wait_until(lambda: not harness.receiver.commands.empty())  # it runs no further than this
        return 1.0

    harness.executor.iteration_s = iteration_s
    harness.client.send(submitted)
    assert stepped.wait(TIMEOUT_S)
    harness.client.send(Cancel("a"))
    (failed,) = harness.client.receive()
    assert failed.code == "cancelled"
    found = stages(collector, tracer, caller)
    assert sorted(found) == [("denoise", "cancelled"), ("queue", None), ("text_encode", None)]


@traced
def test_a_request_whose_pixels_are_not_finite_fails_in_its_decode_span(harness, collector, tracer):
    harness.start()
    submitted, caller = traced_request(request("bad", seed=13))
    harness.client.send(submitted, request("good"))
    harness.client.receive(3)
    assert ("decode", "generation_failed") in stages(collector, tracer, caller)
