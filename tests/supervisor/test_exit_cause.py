"""Classification of engine exits; how messages say the end of a process."""

import signal

import pytest

from noria.supervisor.exit_cause import classify_exit, combine_exits, describe_status


@pytest.mark.parametrize("status", [0, -signal.SIGKILL, -signal.SIGTERM, -signal.SIGQUIT])
def test_a_signal_from_outside_is_a_kill(status):
    assert classify_exit(status, hung=False, num_oom_kills=0) == "killed"


@pytest.mark.parametrize("status", [1, 137, -signal.SIGSEGV, -signal.SIGABRT, -signal.SIGBUS, -signal.SIGFPE])
def test_an_exit_of_its_own_is_a_crash(status):
    assert classify_exit(status, hung=False, num_oom_kills=0) == "crashed"


def test_the_supervisors_sigkill_for_a_hang_is_a_crash():
    assert classify_exit(-signal.SIGKILL, hung=True, num_oom_kills=0) == "crashed"


def test_the_oom_killers_sigkill_is_a_crash():
    assert classify_exit(-signal.SIGKILL, hung=False, num_oom_kills=1) == "crashed"


def test_a_crash_is_kept_when_the_next_run_is_killed_while_loading():
    assert combine_exits("crashed", "killed") == "crashed"
    assert combine_exits("killed", "crashed") == "crashed"
    assert combine_exits("killed", "killed") == "killed"
    assert combine_exits("none", "killed") == "killed"


@pytest.mark.parametrize(
    ("status", "text"),
    [(0, "with status 0"), (3, "with status 3"), (-9, "by SIGKILL"), (-34, "by SIGRTMIN"), (-40, "by signal 40")],
)
def test_the_end_of_a_child_is_said_by_status_or_signal(status, text):
    assert describe_status(status) == text
