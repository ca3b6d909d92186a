"""The requests in flight survive the process that wrote them."""

import os
import signal
import subprocess
import sys

import pytest

from noria.engine.monitoring.crash_journal import CrashJournal, read_in_flight

SCRIPT = """
import os, signal, sys
from noria.engine.monitoring.crash_journal import CrashJournal
journal = CrashJournal(sys.argv[1])
print(*journal.previous_in_flight)
for iteration in sys.argv[2:]:
    journal.record_iteration(iteration.split(","))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def run_and_kill(tmp_path):
    def run(*iterations):
        """Run a process with these iterations, ended by SIGKILL.

        Returns the requests in flight that it found at its start.
        """
        command = [sys.executable, "-c", SCRIPT, str(tmp_path / "in-flight"), *iterations]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=False, env=os.environ | {"PYTHONUNBUFFERED": "1"}
        )
        assert done.returncode == -signal.SIGKILL
        return done.stdout.split()

    return run


def test_a_killed_process_leaves_the_requests_in_flight(run_and_kill):
    assert run_and_kill("a,b", "b,c") == []
    assert run_and_kill() == ["a", "b", "c"]


def test_a_process_without_an_iteration_leaves_the_file_unchanged(run_and_kill):
    run_and_kill("a")
    run_and_kill()
    assert run_and_kill() == ["a"]


def test_a_request_that_ended_three_iterations_ago_is_not_in_flight(run_and_kill):
    run_and_kill("a-long-id-that-ended,b", "b", "b", "b")
    assert run_and_kill() == ["b"]


def test_a_request_in_preparation_is_in_flight(tmp_path):
    journal = CrashJournal(tmp_path / "in-flight")
    journal.record_iteration(["a"])
    with journal.preparing("compiled"):
        assert read_in_flight(tmp_path / "in-flight") == ("a", "compiled")
    journal.record_iteration(["a"])
    assert read_in_flight(tmp_path / "in-flight") == ("a",)
    journal.close()


def test_a_missing_file_and_an_empty_one_list_no_requests(tmp_path):
    assert read_in_flight(tmp_path / "none") == ()
    (tmp_path / "empty").touch()
    assert read_in_flight(tmp_path / "empty") == ()


@pytest.mark.parametrize("kept_bytes", [2, 4, 20, 4096])
def test_an_interrupted_write_lists_no_requests_and_breaks_no_later_process(tmp_path, kept_bytes):
    path = tmp_path / "in-flight"
    journal = CrashJournal(path)
    journal.record_iteration([f"request-{number:04}" for number in range(1000)])
    journal.close()
    path.write_bytes(path.read_bytes()[:kept_bytes])
    later = CrashJournal(path)
    assert later.previous_in_flight == ()
    later.record_iteration(["a"])
    later.close()
    assert read_in_flight(path) == ("a",)


def test_a_new_head_before_an_old_tail_lists_no_requests(tmp_path):
    path = tmp_path / "in-flight"
    path.write_bytes((12).to_bytes(4, "little") + b'["new","n\xc3\xff"]')
    assert read_in_flight(path) == ()


def test_while_it_is_paused_the_file_lists_no_request(tmp_path):
    journal = CrashJournal(tmp_path / "in-flight")
    journal.record_iteration({"a"})
    with journal.paused():
        assert read_in_flight(tmp_path / "in-flight") == ()
        journal.record_iteration({"a", "b"})
        assert read_in_flight(tmp_path / "in-flight") == ()
    assert read_in_flight(tmp_path / "in-flight") == ("a", "b")
    journal.close()
