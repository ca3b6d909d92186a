"""The times of an iteration's phases, on devices that execute them at once and on those that execute them later."""

import threading
import time

import pytest
import torch

from noria.engine.diffusion.timing import DeviceStopwatch, HostStopwatch, PipelineFillDetector
from noria.engine.live.pending_view import TimedIteration
from noria.engine.multi_model import CombinedTimings
from noria.protocol.live_views import IterationView
from noria.scheduling.types import MeasuredTimings, RequestTimings
from waiting import TIMEOUT_S

ITERATION = IterationView(
    number=1,
    started_at=0.0,
    duration_s=0.125,
    text_encode_s=0.0,
    decode_s=0.0,
    num_joined=1,
    num_stepped=1,
    num_decoded=1,
)


class Device:
    """A device on virtual time: launched work is added to `queue_s` and executed once `go` is set."""

    def __init__(self):
        self.queue_s = 0.0
        self.go = threading.Event()

    def event(self, *, enable_timing):
        assert enable_timing
        return Event(self)


class Event:
    def __init__(self, device):
        self.device, self.at = device, None

    def record(self):
        self.at = self.device.queue_s

    def synchronize(self):
        assert self.at is not None
        assert self.device.go.wait(TIMEOUT_S)

    def elapsed_time(self, end):
        assert self.device.go.is_set(), "CUDA would raise: the event has not happened yet"
        return 1000 * (end.at - self.at)


@pytest.fixture
def device(monkeypatch):
    device = Device()
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    return device


def run_iteration(device):
    """Launch an iteration that takes the device 0.25 + 1 + 0.5 s."""
    stopwatch = DeviceStopwatch()
    for phase, takes_s in (("joins", 0.25), ("steps", 1.0), ("decodes", 0.5)):
        with stopwatch.timing(phase):
            device.queue_s += takes_s
    return stopwatch.timings()


def read(timings):
    return tuple(map(timings.seconds, ("joins", "steps", "decodes")))


def test_work_that_is_executed_at_once_is_timed_at_once():
    stopwatch = HostStopwatch()
    with stopwatch.timing("steps"):
        time.sleep(0.02)
    timings = stopwatch.timings()
    assert timings.is_known
    assert (timings.seconds("joins"), timings.seconds("decodes")) == (0, 0)
    assert 0.02 <= timings.seconds("steps") < TIMEOUT_S


def test_a_device_that_runs_behind_is_read_only_when_a_time_is(device):
    timings = run_iteration(device)
    assert not timings.is_known
    readings = []
    reader = threading.Thread(target=lambda: readings.append(read(timings)))
    reader.start()
    reader.join(0.05)
    assert readings == []
    device.go.set()
    reader.join(TIMEOUT_S)
    assert readings == [(0.25, 1.0, 0.5)]


def test_a_failed_phase_is_timed_and_one_that_did_not_run_took_nothing(device):
    stopwatch = DeviceStopwatch()

    def fail():
        with stopwatch.timing("steps"):
            device.queue_s += 2.0
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    device.go.set()
    timings = stopwatch.timings()
    assert read(timings) == (0, 2.0, 0)


def test_the_phases_of_several_models_are_summed(device):
    timings = CombinedTimings((run_iteration(device), MeasuredTimings({"joins": 1.0, "steps": 2.0, "decodes": 3.0})))
    assert not timings.is_known
    device.go.set()
    assert read(timings) == (1.25, 3.0, 3.5)
    assert CombinedTimings((MeasuredTimings(), MeasuredTimings())).is_known


def test_a_requests_stages_sum_up_to_its_time_in_the_slot(device):
    first, last = run_iteration(device), run_iteration(device)
    request_timings = RequestTimings(queue_s=1.0, slot_s=4.0, join_timings=first, decode_timings=last)
    device.go.set()
    assert (request_timings.text_encode_s, request_timings.denoise_s, request_timings.decode_s) == (0.25, 3.25, 0.5)


def test_an_iteration_is_shown_with_the_devices_duration(device):
    device.go.set()
    view = TimedIteration(ITERATION, run_iteration(device)).with_timings()
    assert (view.duration_s, view.text_encode_s, view.decode_s) == (1.75, 0.25, 0.5)


def test_an_iteration_that_the_loop_waited_for_is_shown_with_its_own_duration():
    view = TimedIteration(ITERATION, MeasuredTimings({"joins": 0.025, "steps": 0.05, "decodes": 0.0375})).with_timings()
    assert (view.duration_s, view.text_encode_s, view.decode_s) == (0.125, 0.025, 0.0375)
    assert TimedIteration(ITERATION, None).with_timings() == ITERATION


@pytest.mark.gpu
def test_a_gpu_is_timed_by_its_work_and_not_by_its_launches():
    matrix = torch.randn(8192, 8192, device="cuda:0")
    torch.cuda.synchronize()
    stopwatch, began = DeviceStopwatch(), time.perf_counter()
    with stopwatch.timing("decodes"):
        for _ in range(20):
            matrix = matrix @ matrix
    launched_s = time.perf_counter() - began
    measured_s = stopwatch.timings().seconds("decodes")
    assert launched_s < measured_s <= time.perf_counter() - began


def test_the_first_iterations_of_a_sequence_are_not_timed():
    detector, timed = PipelineFillDetector(2), []
    for now in (0.0, 0.1, 0.2, 0.3, 0.4, 5.0, 5.1, 5.2):
        detector.begin_iteration(now)
        timed.append(detector.end_iteration(now + 0.099))
    assert timed == [False, False, True, True, True, False, False, True]
