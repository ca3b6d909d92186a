"""When an engine counts as hung, in virtual time."""

import pytest

from noria.supervisor.hang_detector import HangDetector


@pytest.fixture
def detector():
    made = HangDetector(hang_timeout_s=60.0, start_timeout_s=900.0)
    made.started(0.0)
    return made


def test_loading_is_no_hang_until_its_own_limit(detector):
    for now in range(0, 900, 2):
        detector.pinged(now)
    assert detector.hang_reason(900.0) is None
    assert detector.hang_reason(901.0) == "it was not ready after 901.0 s"


def test_a_ready_engine_that_does_not_answer_hangs(detector):
    detector.ready()
    for now in range(100, 162, 2):
        assert detector.hang_reason(now) is None
        detector.pinged(now)
    assert detector.hang_reason(160.0) is None
    assert detector.hang_reason(160.5) == "it has not answered for 60.5 s"
    detector.answered(0.0, 60.0)
    assert detector.hang_reason(160.5) is None


def test_a_supervisor_that_was_suspended_finds_no_hang(detector):
    detector.ready()
    detector.pinged(100.0)
    assert detector.hang_reason(1000.0) is None  # one ping: its reply is still in the socket
    detector.pinged(1000.0)
    assert detector.hang_reason(1000.0) is None


def test_a_machine_that_was_suspended_while_a_child_was_busy_has_no_hang(detector):
    detector.ready()
    for now in (100.0, 102.0, 104.0, 1000.0, 1002.0, 1004.0):
        detector.pinged(now)
        assert detector.hang_reason(now) is None


def test_an_iteration_beyond_its_limit_hangs_although_the_receiver_answers(detector):
    detector.ready()
    detector.answered(250.0, 250.0)
    assert detector.hang_reason(1.0) is None
    detector.answered(250.1, 250.0)
    assert "250.1 s" in detector.hang_reason(1.0)
    detector.answered(0.0, 2501.0)
    assert detector.hang_reason(1.0) is None


def test_a_new_run_starts_without_earlier_pings(detector):
    detector.ready()
    detector.answered(61.0, 60.0)
    for now in (0.0, 1.0, 2.0):
        detector.pinged(now)
    detector.ended()
    assert detector.hang_reason(5000.0) is None
    detector.started(5000.0)
    assert detector.hang_reason(5001.0) is None
    detector.ready()
    assert detector.hang_reason(5001.0) is None
