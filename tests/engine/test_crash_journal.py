"""Who is aboard outlives the process that wrote it."""

import os
import signal
import subprocess
import sys

import pytest

from noria.engine.crash_journal import CrashJournal, read_in_flight

SCRIPT = """
import os, signal, sys
from noria.engine.crash_journal import Manifest
manifest = Manifest(sys.argv[1])
print(*manifest.before)
for turn in sys.argv[2:]:
    manifest.turn(turn.split(","))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def run_and_kill(tmp_path):
    def run(*iterations):
        """Who was aboard at the end before, as a life with these turns, ended by SIGKILL, finds it."""
        command = [sys.executable, "-c", SCRIPT, str(tmp_path / "aboard"), *iterations]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=False, env=os.environ | {"PYTHONUNBUFFERED": "1"}
        )
        assert done.returncode == -signal.SIGKILL
        return done.stdout.split()

    return run


def test_a_killed_life_leaves_who_was_aboard(run_and_kill):
    assert run_and_kill("a,b", "b,c") == []
    assert run_and_kill() == ["a", "b", "c"]


def test_a_life_without_a_turn_leaves_what_it_found(run_and_kill):
    run_and_kill("a")
    run_and_kill()
    assert run_and_kill() == ["a"]


def test_who_left_three_turns_ago_is_no_longer_aboard(run_and_kill):
    run_and_kill("long-name-that-left,b", "b", "b", "b")
    assert run_and_kill() == ["b"]


def test_who_is_being_prepared_is_aboard(tmp_path):
    journal = CrashJournal(tmp_path / "aboard")
    journal.record_iteration(["a"])
    with journal.preparing("compiled"):
        assert read_in_flight(tmp_path / "aboard") == ("a", "compiled")
    journal.record_iteration(["a"])
    assert read_in_flight(tmp_path / "aboard") == ("a",)
    journal.close()


def test_no_file_and_an_empty_one_name_nobody(tmp_path):
    assert read_in_flight(tmp_path / "none") == ()
    (tmp_path / "empty").touch()
    assert read_in_flight(tmp_path / "empty") == ()


@pytest.mark.parametrize("kept_bytes", [2, 4, 20, 4096])
def test_a_write_that_was_cut_names_nobody_and_ends_no_later_life(tmp_path, kept_bytes):
    path = tmp_path / "aboard"
    journal = CrashJournal(path)
    journal.record_iteration([f"request-{number:04}" for number in range(1000)])
    journal.close()
    path.write_bytes(path.read_bytes()[:kept_bytes])
    later = CrashJournal(path)
    assert later.previous_in_flight == ()
    later.record_iteration(["a"])
    later.close()
    assert read_in_flight(path) == ("a",)


def test_a_new_head_before_an_old_tail_names_nobody(tmp_path):
    path = tmp_path / "aboard"
    path.write_bytes((12).to_bytes(4, "little") + b'["new","n\xc3\xff"]')
    assert read_in_flight(path) == ()
