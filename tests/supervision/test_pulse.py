"""When an engine counts as hung, in virtual time."""

import pytest

from noria.supervision.pulse import Pulse


@pytest.fixture
def pulse():
    made = Pulse(hang_timeout_s=60.0, start_timeout_s=900.0)
    made.started(0.0)
    return made


def test_loading_is_no_hang_until_its_own_limit(pulse):
    for now in range(0, 900, 2):
        pulse.pinged(now)
    assert pulse.hang(900.0) is None
    assert pulse.hang(901.0) == "it was not ready after 901.0 s"


def test_a_ready_engine_that_says_nothing_hangs(pulse):
    pulse.ready()
    for now in range(100, 162, 2):
        assert pulse.hang(now) is None
        pulse.pinged(now)
    assert pulse.hang(160.0) is None
    assert pulse.hang(160.5) == "it has not answered for 60.5 s"
    pulse.answered(0.0, 60.0)
    assert pulse.hang(160.5) is None


def test_a_supervisor_that_slept_itself_blames_nobody(pulse):
    pulse.ready()
    pulse.pinged(100.0)
    assert pulse.hang(1000.0) is None  # one ping: its answer lies in our own socket
    pulse.pinged(1000.0)
    assert pulse.hang(1000.0) is None


def test_a_turn_beyond_its_limit_hangs_although_the_desk_answers(pulse):
    pulse.ready()
    pulse.answered(250.0, 250.0)
    assert pulse.hang(1.0) is None
    pulse.answered(250.1, 250.0)
    assert pulse.hang(1.0) == "one turn has taken 250.1 s, of at most 250.0 s"
    pulse.answered(0.0, 2501.0)
    assert pulse.hang(1.0) is None


def test_a_new_life_inherits_nothing(pulse):
    pulse.ready()
    pulse.answered(61.0, 60.0)
    for now in (0.0, 1.0, 2.0):
        pulse.pinged(now)
    pulse.ended()
    assert pulse.hang(5000.0) is None
    pulse.started(5000.0)
    assert pulse.hang(5001.0) is None
    pulse.ready()
    assert pulse.hang(5001.0) is None
