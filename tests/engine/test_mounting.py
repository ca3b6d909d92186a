"""Models come and go in a running engine, with a real channel, real client sockets and fake devices."""

import math
import threading
import time

import msgspec
import pytest

from noria.engine import mounting
from noria.engine.monitoring.crash_journal import read_in_flight
from noria.engine.multi_model import MultiModelExecutor
from noria.engine.runtime import LoadedModel, StepRuntime
from noria.errors import ModelError
from noria.protocol.messages import (
    Cancel,
    CancelMount,
    EngineLoad,
    EngineState,
    Failed,
    Finished,
    Hello,
    ImageDone,
    Mount,
    MountResult,
    NotHeld,
    Ping,
    Pong,
    Progress,
    Unmount,
)
from noria.scheduling.step.scheduler import StepScheduler
from noria.testing.fake_encoder import FAKE_ENCODER
from noria.testing.fake_engine import FAKE_MODEL
from noria.testing.fake_executor import FakeExecutor
from noria.testing.requests import make_image_request
from noria.testing.virtual_clock import VirtualClock
from running_engine import RunningEngine
from waiting import TIMEOUT_S, wait_until

NEWER = msgspec.structs.replace(FAKE_MODEL, fingerprint="newer0000000")
OTHER = msgspec.structs.replace(FAKE_MODEL, name="other")


class PanicError(BaseException):
    """An error such as a panic in Rust, which comes out of `tokenizers`: it is no Exception."""


def request(request_id, spec=FAKE_MODEL, version=None, steps=3, scheduler="ddim"):
    made = make_image_request(request_id, spec.name, inference_steps=steps, scheduler=scheduler)
    return msgspec.structs.replace(made, model_version=spec.fingerprint if version is None else version)


class Device(FakeExecutor):
    """A fake device, which compiles "lms" when `compiled` is set, and steps when `may_step` is."""

    def __init__(self):
        super().__init__(VirtualClock(), self.wait)
        self.compiled, self.may_step, self.began = threading.Event(), threading.Event(), threading.Event()
        self.may_step.set()
        self.prepared = []

    def wait(self, _plan):
        self.began.set()
        assert self.may_step.wait(TIMEOUT_S)
        return 1.0

    def is_compiled(self, request):
        return request.payload.scheduler != "lms"

    def prepare(self, request, data=None):
        self.prepared.append(request.request_id)
        if request.payload.scheduler == "lms":
            assert self.compiled.wait(TIMEOUT_S)
        return super().prepare(request, data)


class Harness(RunningEngine):
    """An engine that holds FAKE_MODEL, and two clients."""

    def __init__(self, folder):
        super().__init__(folder, [FAKE_MODEL])
        self.devices = {FAKE_MODEL.key: Device()}
        self.executor = MultiModelExecutor(dict(self.devices))
        self.failure, self.failures_left = None, math.inf  # raised by so many loads
        self.loads, self.released, self.num_freed = [], [], 0
        self.may_load = threading.Event()
        self.may_load.set()
        self.start(
            StepRuntime(
                self.executor, StepScheduler(4), load_beside=self.load, release=self.release, free_memory=self.free
            )
        )
        self.client, self.other = self.connect(), self.connect()
        for client in self.clients:
            client.send(Hello(f"client {id(client)}"))
            client.receive()

    def load(self, spec):
        self.loads.append(spec.key)
        assert self.may_load.wait(TIMEOUT_S)
        if self.failure is not None and self.failures_left:
            self.failures_left -= 1
            raise self.failure
        device = self.devices[spec.key] = Device()
        return LoadedModel(lambda: self.executor.add(spec.key, device), longest_iteration_s=7.0)

    def release(self, key):
        assert threading.current_thread() is self.thread
        self.executor.remove(key)
        self.released.append(key)

    def free(self):
        assert threading.current_thread() is not self.thread
        self.num_freed += 1

    def generate(self, *requests):
        """Serve requests one after the other."""
        for each in requests:
            self.client.send(each)
            image, end = self.client.receive(2)
            assert (image.attempt_id, type(image), type(end)) == (each.attempt_id, ImageDone, Finished)

    def close(self):
        for device in self.devices.values():
            device.may_step.set()
            device.compiled.set()
        self.may_load.set()
        super().close()


@pytest.fixture
def harness(tmp_path):
    made = Harness(tmp_path)
    yield made
    made.close()


def test_a_second_version_serves_beside_the_first(harness):
    harness.client.send(Mount("a", NEWER))
    state, result = harness.client.receive(2)
    assert (state.models, result) == ((FAKE_MODEL, NEWER), MountResult("a"))
    assert [type(each) for each in harness.other.receive()] == [EngineState]
    first, newer = harness.devices.values()
    harness.generate(request("1"), request("2", NEWER), request("3", version=""))
    assert (first.prepared, newer.prepared) == (["1", "3"], ["2"])
    assert harness.watchdog.hang_limit_s == 70.0  # ten times the longest iteration of the new model


def test_requests_and_pings_are_answered_while_a_model_loads(harness):
    harness.may_load.clear()
    harness.client.send(Mount("a", NEWER))
    wait_until(lambda: harness.loads)
    loading_since = time.monotonic()
    harness.generate(request("1"), request("2"))
    loading_s = time.monotonic() - loading_since
    harness.client.send(Ping(), request("3", NEWER))
    pong, failed = harness.client.receive(2)
    assert failed.code == "engine_unavailable"
    assert pong.busy_s < loading_s  # the time of the end of an iteration, if at all, and not of the load
    harness.may_load.set()
    assert harness.client.receive(2)[1] == MountResult("a")


def test_changes_are_made_one_after_the_other(harness):
    harness.may_load.clear()
    harness.client.send(Mount("a", NEWER), Mount("b", OTHER))
    wait_until(lambda: harness.loads)
    harness.other.send(Mount("c", NEWER), Unmount("d", NEWER.name, NEWER.fingerprint))
    harness.may_load.set()
    a, b = harness.client.receive(2, ignored=(EngineState, EngineLoad))
    c, d = harness.other.receive(2, ignored=(EngineState, EngineLoad))
    assert (a, b, c, d) == tuple(MountResult(name) for name in "abcd")
    assert harness.loads == [NEWER.key, OTHER.key]  # the version that is held already is not loaded again
    assert harness.released == [NEWER.key]
    harness.client.send(Hello("again"))
    assert harness.client.receive()[0].models == (FAKE_MODEL, OTHER)


@pytest.mark.parametrize(
    ("failure", "error"),
    [
        (ModelError("the weights are damaged\nand more"), "the weights are damaged"),
        (RuntimeError("CUDA out of memory. Tried to allocate\nmuch"), "CUDA out of memory. Tried to allocate"),
        (MemoryError(), "tiny in /nowhere cannot be loaded: MemoryError"),
        (PanicError("index out of range"), "cannot be loaded: index out of range"),
    ],
)
def test_a_load_that_fails_leaves_the_models_as_they_were(harness, failure, error):
    harness.failure = failure
    harness.client.send(Mount("a", NEWER))
    (result,) = harness.client.receive()
    assert (result.change_id, result.error.endswith(error)) == ("a", True)
    assert "\n" not in result.error
    assert harness.num_freed == 1
    harness.generate(request("1"))
    harness.failure = None
    harness.client.send(Mount("b", NEWER))
    assert harness.client.receive(2)[1] == MountResult("b")


def test_a_model_of_another_kind_is_rejected(harness):
    harness.client.send(Mount("a", FAKE_ENCODER))
    (result,) = harness.client.receive()
    assert "fake-encoder is a model of kind encoder, and this engine holds models of kind diffusion" in result.error
    assert not harness.loads


def test_requests_in_flight_are_served_before_their_model_is_released(harness):
    harness.client.send(Mount("a", NEWER))
    harness.client.receive(2)
    harness.other.receive()
    first, newer = harness.devices[FAKE_MODEL.key], harness.devices[NEWER.key]
    first.may_step.clear()
    harness.client.send(request("running", version=""), request("compiling", scheduler="lms"))
    assert first.began.wait(TIMEOUT_S)
    wait_until(lambda: "compiling" in first.prepared)
    harness.client.send(Unmount("b", FAKE_MODEL.name, FAKE_MODEL.fingerprint))
    (state,) = harness.client.receive()
    assert state.models == (NEWER,)
    harness.client.send(request("late"), request("moved", version=""))
    (late,) = harness.client.receive()
    assert (late.attempt_id, late.code) == ("late", "engine_unavailable")
    wait_until(lambda: newer.prepared == ["moved"])  # without a version, it is served by the one that stays
    first.may_step.set()
    ended = [each.attempt_id for each in harness.client.receive(4) if isinstance(each, Finished)]
    assert sorted(ended) == ["moved", "running"]
    assert not harness.released
    first.compiled.set()
    image, end, result = harness.client.receive(3)
    assert (image.attempt_id, type(end), result) == ("compiling", Finished, MountResult("b"))
    assert (harness.released, harness.num_freed) == ([FAKE_MODEL.key], 1)
    harness.generate(request("next", NEWER))


def test_a_cancelled_compilation_holds_no_model(harness):
    harness.client.send(Mount("a", NEWER))
    harness.client.receive(2)
    harness.client.send(request("compiling", NEWER, scheduler="lms"))
    wait_until(lambda: harness.devices[NEWER.key].prepared)
    harness.client.send(Unmount("b", NEWER.name, NEWER.fingerprint))
    assert harness.client.receive()[0].models == (FAKE_MODEL,)
    harness.client.send(Cancel("compiling"))
    assert {type(each) for each in harness.client.receive(2)} == {Failed, MountResult}
    assert harness.released == [NEWER.key]


def test_a_model_that_is_not_held_and_the_last_one(harness):
    harness.client.send(Unmount("a", NEWER.name, NEWER.fingerprint))
    harness.client.send(Unmount("b", FAKE_MODEL.name, FAKE_MODEL.fingerprint))
    nothing, last = harness.client.receive(2)
    assert nothing == MountResult("a")
    assert last.error == "tiny in version 0123456789ab is the only model of this engine; mount another one first."
    harness.generate(request("1"))


def test_a_change_is_made_although_its_client_has_left(harness):
    harness.may_load.clear()
    harness.client.send(Mount("a", NEWER))
    wait_until(lambda: harness.loads)
    harness.client.socket.close(0)
    harness.may_load.set()
    assert harness.other.receive()[0].models == (FAKE_MODEL, NEWER)


def test_no_request_is_blamed_for_a_crash_while_a_model_loads(harness):
    first = harness.devices[FAKE_MODEL.key]
    first.may_step.clear()
    harness.client.send(request("1"))
    assert first.began.wait(TIMEOUT_S)
    assert read_in_flight(harness.journal) == ("1",)
    harness.may_load.clear()
    harness.client.send(Mount("a", NEWER))
    wait_until(lambda: read_in_flight(harness.journal) == ())
    harness.may_load.set()
    wait_until(lambda: read_in_flight(harness.journal) == ("1",))


def test_an_engine_ends_while_a_model_loads_and_while_one_waits_for_its_requests(harness):
    harness.client.send(Mount("a", NEWER))
    harness.client.receive(2)
    newer = harness.devices[NEWER.key]
    newer.may_step.clear()
    harness.client.send(request("1", NEWER, steps=100_000))
    assert newer.began.wait(TIMEOUT_S)
    harness.client.send(Unmount("b", NEWER.name, NEWER.fingerprint))
    assert harness.client.receive()[0].models == (FAKE_MODEL,)
    harness.engine.stop()
    newer.may_step.set()
    harness.thread.join(TIMEOUT_S)
    assert not harness.thread.is_alive()
    assert not harness.released


def test_a_mount_that_replaces_the_only_model_releases_it_first(harness):
    harness.may_load.clear()
    harness.client.send(Mount("a", NEWER, (FAKE_MODEL.key,)))
    (state,) = harness.client.receive(1)
    assert (state.state, state.models, state.replaced) == ("ready", (), (FAKE_MODEL,))
    wait_until(lambda: harness.loads)
    assert harness.released == [FAKE_MODEL.key] and harness.num_freed == 1
    harness.client.send(request("early"))
    (failed,) = harness.client.receive(1)
    assert (failed.code, failed.retry_after_s is not None) == ("engine_unavailable", True)
    harness.may_load.set()
    state, result = harness.client.receive(2)
    assert (state.models, state.replaced, result) == ((NEWER,), (), MountResult("a"))
    harness.generate(request("later", NEWER))


def test_what_a_failed_mount_was_to_replace_is_loaded_again(harness):
    harness.failure = ModelError("no weights")
    harness.failures_left = 1
    harness.client.send(Mount("a", NEWER, (FAKE_MODEL.key,)))
    _, state, result = harness.client.receive(3)
    assert (state.models, state.replaced) == ((FAKE_MODEL,), ())
    assert result == MountResult("a", "no weights. The version before serves again.")
    assert harness.loads == [NEWER.key, FAKE_MODEL.key]
    harness.generate(request("later"))


def test_requests_in_flight_are_served_before_their_model_is_replaced(harness):
    device = harness.devices[FAKE_MODEL.key]
    device.may_step.clear()
    harness.client.send(request("running"))
    assert device.began.wait(TIMEOUT_S)
    harness.other.send(Mount("a", NEWER, (FAKE_MODEL.key,)))
    harness.other.receive(1)
    assert harness.loads == []
    device.may_step.set()
    image, end = harness.client.receive(2, ignored=(Progress, EngineLoad, EngineState))
    assert (type(image), type(end)) == (ImageDone, Finished)
    _, result = harness.other.receive(2)
    assert result == MountResult("a")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_thread_ends_if_neither_model_can_be_loaded(harness):
    harness.failure = ModelError("no weights")
    harness.client.send(Mount("a", NEWER, (FAKE_MODEL.key,)))
    wait_until(lambda: harness.loads == [NEWER.key, FAKE_MODEL.key])
    wait_until(lambda: not any(thread.name == "mounter" for thread in threading.enumerate()))  # which ends an engine


def mount(harness, spec, max_loaded):
    """Mount a checkpoint; return the error."""
    harness.client.send(Mount(spec.name, spec, max_loaded=max_loaded))
    while not isinstance(message := harness.client.receive()[0], MountResult):
        assert isinstance(message, EngineState | ImageDone | Finished)
    return message.error


def test_checkpoints_make_room_for_each_other_idle_ones_first_then_by_their_last_use(harness, monkeypatch):
    monkeypatch.setattr(mounting, "_MIN_STAY_S", 0.0)
    first, second, third, fourth = (msgspec.structs.replace(FAKE_MODEL, name=name) for name in "abcd")
    assert [mount(harness, spec, 2) for spec in (first, second)] == ["", ""]
    harness.generate(request("1", first))
    assert mount(harness, third, 2) == ""
    assert harness.released == [second.key]
    harness.client.send(request("late", second))
    assert harness.client.receive() == [NotHeld("late")]  # a front end has it loaded again
    device = harness.devices[first.key]
    device.began.clear()
    device.may_step.clear()
    harness.client.send(request("running", first))
    assert device.began.wait(TIMEOUT_S)
    harness.client.send(request("newer", third), Mount("d", fourth, max_loaded=2))
    (state,) = harness.client.receive()
    assert state.models == (FAKE_MODEL, first)
    device.may_step.set()
    ended = {each.attempt_id for each in harness.client.receive(6) if isinstance(each, Finished)}
    assert (ended, harness.released) == ({"running", "newer"}, [second.key, third.key])
    assert harness.receiver.models == (FAKE_MODEL, first, fourth)


def test_a_mount_that_is_cancelled_before_its_turn_unloads_nothing(harness, monkeypatch):
    monkeypatch.setattr(mounting, "_MIN_STAY_S", 0.0)
    assert mount(harness, OTHER, 1) == ""
    harness.may_load.clear()
    harness.other.send(Mount("a", NEWER))
    wait_until(lambda: NEWER.key in harness.loads)
    third = msgspec.structs.replace(FAKE_MODEL, name="third")
    harness.client.send(Mount("b", third, max_loaded=1), CancelMount("b"), Ping())
    assert isinstance(harness.client.receive()[0], Pong)
    harness.may_load.set()
    assert harness.client.receive(2)[1] == MountResult("b", "the mount was cancelled.")
    assert harness.receiver.models == (FAKE_MODEL, OTHER, NEWER)


def test_a_checkpoint_that_cannot_be_loaded_leaves_the_others_and_is_tried_again(harness, monkeypatch):
    monkeypatch.setattr(mounting, "_MIN_STAY_S", 0.0)
    assert mount(harness, OTHER, 1) == ""
    harness.failure, harness.failures_left = ModelError("it is damaged."), 1
    assert mount(harness, NEWER, 1) == "it is damaged."
    harness.generate(request("still"))
    assert mount(harness, NEWER, 1) == ""
    assert harness.receiver.models == (FAKE_MODEL, NEWER)
