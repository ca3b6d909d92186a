"""What the parts of a turn take, where the device does them when it was ordered and where it does them later."""

import threading
import time

import pytest
import torch

from noria.engine.cells import Spun
from noria.engine.stopwatch import DeviceStopwatch, HostStopwatch, SpentTogether
from noria.scheduling.plans import Measured, Times
from noria.views import TurnView
from waiting import WITHIN_S

TURN = TurnView(
    number=1, began_at=0.0, seconds=0.125, encode_s=0.0, decode_s=0.0, num_boarded=1, num_stepped=1, num_decoded=1
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
        assert self.device.go.wait(WITHIN_S)

    def elapsed_time(self, end):
        assert self.device.go.is_set(), "CUDA would raise: the device is not there yet"
        return 1000 * (end.at - self.at)


@pytest.fixture
def device(monkeypatch):
    device = Device()
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    return device


def turn_on(device):
    """A turn that takes it 0.25 + 1 + 0.5 s, and a moment to order."""
    watch = DeviceStopwatch()
    for part, takes_s in (("boards", 0.25), ("steps", 1.0), ("decodes", 0.5)):
        with watch.timing(part):
            device.queue_s += takes_s
    return watch.spent()


def test_what_is_done_at_once_is_timed_at_once():
    watch = HostStopwatch()
    with watch.timing("steps"):
        time.sleep(0.02)
    spent = watch.spent()
    assert spent.is_known
    assert (spent.encode_s, spent.decode_s) == (0, 0)
    assert 0.02 <= spent.step_s < WITHIN_S


def test_a_device_that_works_behind_is_asked_nothing_until_somebody_waits_for_it(device):
    spent = turn_on(device)
    assert not spent.is_known
    told = []
    reader = threading.Thread(target=lambda: told.append((spent.encode_s, spent.step_s, spent.decode_s)))
    reader.start()
    reader.join(0.05)
    assert told == []
    device.go.set()
    reader.join(WITHIN_S)
    assert told == [(0.25, 1.0, 0.5)]


def test_a_part_that_failed_is_timed_and_one_that_was_not_begun_took_nothing(device):
    watch = DeviceStopwatch()

    def fail():
        with watch.timing("steps"):
            device.queue_s += 2.0
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    device.go.set()
    spent = watch.spent()
    assert (spent.encode_s, spent.step_s, spent.decode_s) == (0, 2.0, 0)


def test_several_models_parts_are_added_up(device):
    spent = SpentTogether((turn_on(device), Measured(1.0, 2.0, 3.0)))
    assert not spent.is_known
    device.go.set()
    assert (spent.encode_s, spent.step_s, spent.decode_s) == (1.25, 3.0, 3.5)
    assert SpentTogether((Measured(), Measured())).is_known


def test_a_requests_stages_are_the_devices_and_fill_its_time_in_the_slot(device):
    first, last = turn_on(device), turn_on(device)
    times = Times(queue_s=1.0, slot_s=4.0, boarding=first, decoding=last)
    device.go.set()
    assert (times.encode_s, times.denoise_s, times.decode_s) == (0.25, 3.25, 0.5)


def test_a_turn_on_the_wheel_is_shown_as_long_as_the_device_took(device):
    device.go.set()
    shown = Spun(TURN, turn_on(device)).timed()
    assert (shown.seconds, shown.encode_s, shown.decode_s) == (1.75, 0.25, 0.5)


def test_a_turn_that_the_wheel_waited_for_is_shown_as_the_wheel_saw_it():
    shown = Spun(TURN, Measured(0.025, 0.05, 0.0375)).timed()
    assert (shown.seconds, shown.encode_s, shown.decode_s) == (0.125, 0.025, 0.0375)
    assert Spun(TURN, None).timed() == TURN


@pytest.mark.gpu
def test_a_gpu_is_timed_by_its_work_and_not_by_its_orders():
    matrix = torch.randn(8192, 8192, device="cuda:0")
    torch.cuda.synchronize()
    watch, began = DeviceStopwatch(), time.perf_counter()
    with watch.timing("decodes"):
        for _ in range(20):
            matrix = matrix @ matrix
    ordered_s = time.perf_counter() - began
    spent_s = watch.spent().decode_s
    assert ordered_s < spent_s <= time.perf_counter() - began
