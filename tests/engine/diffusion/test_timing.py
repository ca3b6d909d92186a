"""What the parts of a turn take, where the device does them when it was ordered and where it does them later."""

import threading
import time

import pytest
import torch

from noria.engine.diffusion.timing import CombinedTimings, DeviceStopwatch, HostStopwatch
from noria.engine.pending_view import TimedIteration
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
    """A device on virtual time: what it is ordered to do is added to its `queue_s`, and done when it may `go`."""

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
        assert self.device.go.is_set(), "CUDA would raise: the device is not there yet"
        return 1000 * (end.at - self.at)


@pytest.fixture
def device(monkeypatch):
    device = Device()
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    return device


def run_iteration(device):
    """A turn that takes it 0.25 + 1 + 0.5 s, and a moment to order."""
    stopwatch = DeviceStopwatch()
    for phase, takes_s in (("boards", 0.25), ("steps", 1.0), ("decodes", 0.5)):
        with stopwatch.timing(phase):
            device.queue_s += takes_s
    return stopwatch.timings()


def test_what_is_done_at_once_is_timed_at_once():
    stopwatch = HostStopwatch()
    with stopwatch.timing("steps"):
        time.sleep(0.02)
    timings = stopwatch.timings()
    assert timings.is_known
    assert (timings.text_encode_s, timings.decode_s) == (0, 0)
    assert 0.02 <= timings.step_s < TIMEOUT_S


def test_a_device_that_works_behind_is_asked_nothing_until_somebody_waits_for_it(device):
    timings = run_iteration(device)
    assert not timings.is_known
    readings = []
    reader = threading.Thread(target=lambda: readings.append((timings.text_encode_s, timings.step_s, timings.decode_s)))
    reader.start()
    reader.join(0.05)
    assert readings == []
    device.go.set()
    reader.join(TIMEOUT_S)
    assert readings == [(0.25, 1.0, 0.5)]


def test_a_part_that_failed_is_timed_and_one_that_was_not_begun_took_nothing(device):
    stopwatch = DeviceStopwatch()

    def fail():
        with stopwatch.timing("steps"):
            device.queue_s += 2.0
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    device.go.set()
    timings = stopwatch.timings()
    assert (timings.text_encode_s, timings.step_s, timings.decode_s) == (0, 2.0, 0)


def test_several_models_parts_are_added_up(device):
    timings = CombinedTimings((run_iteration(device), MeasuredTimings(1.0, 2.0, 3.0)))
    assert not timings.is_known
    device.go.set()
    assert (timings.text_encode_s, timings.step_s, timings.decode_s) == (1.25, 3.0, 3.5)
    assert CombinedTimings((MeasuredTimings(), MeasuredTimings())).is_known


def test_a_requests_stages_are_the_devices_and_fill_its_time_in_the_slot(device):
    first, last = run_iteration(device), run_iteration(device)
    request_timings = RequestTimings(queue_s=1.0, slot_s=4.0, join_timings=first, decode_timings=last)
    device.go.set()
    assert (request_timings.text_encode_s, request_timings.denoise_s, request_timings.decode_s) == (0.25, 3.25, 0.5)


def test_a_turn_on_the_wheel_is_shown_as_long_as_the_device_took(device):
    device.go.set()
    view = TimedIteration(ITERATION, run_iteration(device)).with_timings()
    assert (view.duration_s, view.text_encode_s, view.decode_s) == (1.75, 0.25, 0.5)


def test_a_turn_that_the_wheel_waited_for_is_shown_as_the_wheel_saw_it():
    view = TimedIteration(ITERATION, MeasuredTimings(0.025, 0.05, 0.0375)).with_timings()
    assert (view.duration_s, view.text_encode_s, view.decode_s) == (0.125, 0.025, 0.0375)
    assert TimedIteration(ITERATION, None).with_timings() == ITERATION


@pytest.mark.gpu
def test_a_gpu_is_timed_by_its_work_and_not_by_its_orders():
    matrix = torch.randn(8192, 8192, device="cuda:0")
    torch.cuda.synchronize()
    stopwatch, began = DeviceStopwatch(), time.perf_counter()
    with stopwatch.timing("decodes"):
        for _ in range(20):
            matrix = matrix @ matrix
    ordered_s = time.perf_counter() - began
    measured_s = stopwatch.timings().decode_s
    assert ordered_s < measured_s <= time.perf_counter() - began
