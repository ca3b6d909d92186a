"""Hang detection on virtual time."""

import pytest

from noria.engine.monitoring.watchdog import HangWatchdog
from noria.testing.virtual_clock import VirtualClock


def test_an_idle_engine_is_not_busy_and_a_working_one_is_since_its_iteration_began():
    clock = VirtualClock()
    watchdog = HangWatchdog(60.0, clock)
    clock.now = 1000.0
    assert watchdog.busy_s == 0.0
    with watchdog.loop:
        clock.now += 5.0
        assert watchdog.busy_s == 5.0
    assert watchdog.busy_s == 0.0


def test_a_sender_that_waits_for_the_device_is_busy_although_the_loop_is_idle():
    clock = VirtualClock()
    watchdog = HangWatchdog(60.0, clock)
    with watchdog.sender:
        clock.now += 70.0
        assert (watchdog.busy_s, watchdog.hang_limit_s) == (70.0, 60.0)


def test_slow_iterations_raise_the_limit_also_those_of_the_warm_up():
    clock = VirtualClock()
    watchdog = HangWatchdog(60.0, clock)
    watchdog.expect_iteration(8.0)
    assert watchdog.hang_limit_s == 80.0
    with watchdog.loop:
        clock.now += 20.0
    assert watchdog.hang_limit_s == 200.0
    watchdog.expect_iteration(1.0)
    assert watchdog.hang_limit_s == 200.0


def test_work_that_raises_has_ended():
    clock = VirtualClock()
    watchdog = HangWatchdog(60.0, clock)
    with pytest.raises(ZeroDivisionError), watchdog.loop:
        _ = 1 / 0
    clock.now += 100.0
    assert watchdog.busy_s == 0.0
