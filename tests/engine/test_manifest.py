"""Who is aboard outlives the process that wrote it."""

import os
import signal
import subprocess
import sys

import pytest

from noria.engine.manifest import Manifest, read

LIFE = """
import os, signal, sys
from noria.engine.manifest import Manifest
manifest = Manifest(sys.argv[1])
print(*manifest.before)
for turn in sys.argv[2:]:
    manifest.turn(turn.split(","))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def live(tmp_path):
    def run(*turns):
        """Who was aboard at the end before, as a life with these turns, ended by SIGKILL, finds it."""
        command = [sys.executable, "-c", LIFE, str(tmp_path / "aboard"), *turns]
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=False, env=os.environ | {"PYTHONUNBUFFERED": "1"}
        )
        assert done.returncode == -signal.SIGKILL
        return done.stdout.split()

    return run


def test_a_killed_life_leaves_who_was_aboard(live):
    assert live("a,b", "b,c") == []
    assert live() == ["a", "b", "c"]


def test_a_life_without_a_turn_leaves_what_it_found(live):
    live("a")
    live()
    assert live() == ["a"]


def test_who_left_three_turns_ago_is_no_longer_aboard(live):
    live("long-name-that-left,b", "b", "b", "b")
    assert live() == ["b"]


def test_who_is_being_prepared_is_aboard(tmp_path):
    manifest = Manifest(tmp_path / "aboard")
    manifest.turn(["a"])
    with manifest.preparing("compiled"):
        assert read(tmp_path / "aboard") == ("a", "compiled")
    manifest.turn(["a"])
    assert read(tmp_path / "aboard") == ("a",)
    manifest.close()


def test_no_file_and_an_empty_one_name_nobody(tmp_path):
    assert read(tmp_path / "none") == ()
    (tmp_path / "empty").touch()
    assert read(tmp_path / "empty") == ()


@pytest.mark.parametrize("kept_bytes", [2, 4, 20, 4096])
def test_a_write_that_was_cut_names_nobody_and_ends_no_later_life(tmp_path, kept_bytes):
    path = tmp_path / "aboard"
    manifest = Manifest(path)
    manifest.turn([f"request-{number:04}" for number in range(1000)])
    manifest.close()
    path.write_bytes(path.read_bytes()[:kept_bytes])
    later = Manifest(path)
    assert later.before == ()
    later.turn(["a"])
    later.close()
    assert read(path) == ("a",)


def test_a_new_head_before_an_old_tail_names_nobody(tmp_path):
    path = tmp_path / "aboard"
    path.write_bytes((12).to_bytes(4, "little") + b'["new","n\xc3\xff"]')
    assert read(path) == ()
