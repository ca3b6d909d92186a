"""How an engine ended."""

import signal

import pytest

from noria.supervisor.exit_cause import classify_exit, combine_exits


@pytest.mark.parametrize("status", [0, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGQUIT])
def test_who_was_signalled_from_outside_was_killed(status):
    assert classify_exit(status, hung=False, num_oom_kills=0) == "killed"


@pytest.mark.parametrize("status", [1, 137, -signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS, -signal.SIGFPE])
def test_who_ended_by_itself_crashed(status):
    assert classify_exit(status, hung=False, num_oom_kills=0) == "crashed"


def test_our_own_sigkill_for_a_hang_is_a_crash():
    assert classify_exit(-signal.SIGKILL, hung=True, num_oom_kills=0) == "crashed"


def test_the_kernels_sigkill_for_want_of_memory_is_a_crash():
    assert classify_exit(-signal.SIGKILL, hung=False, num_oom_kills=1) == "crashed"


def test_a_crash_is_not_forgotten_for_a_run_that_was_killed_while_it_loaded():
    assert combine_exits("crashed", "killed") == "crashed"
    assert combine_exits("killed", "crashed") == "crashed"
    assert combine_exits("killed", "killed") == "killed"
    assert combine_exits("none", "killed") == "killed"
