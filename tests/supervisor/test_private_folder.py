"""The private folder of a server, and those that killed servers left behind."""

import fcntl
import os
import pathlib
import signal
import stat
import subprocess
import sys
import tempfile

import pytest

from noria.errors import ConfigError
from noria.supervisor.private_folder import make_young, private_folder

KILLED = """
import os, pathlib, signal
from noria.supervisor.private_folder import make_young, private_folder
with private_folder() as folder:
    pathlib.Path(folder, "counter_7.db").touch()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def parent(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_folder_is_private_and_removed_at_the_end(parent):
    with private_folder() as folder:
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
        assert os.listdir(parent) == [os.path.basename(folder)]
    assert os.listdir(parent) == []


def test_cleaners_that_respect_locks_or_ages_leave_the_folder(parent):
    with private_folder() as folder:
        fd = os.open(folder, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # as systemd-tmpfiles does
        os.close(fd)
        for number in range(9):
            pathlib.Path(folder, f"{number}.db").touch()
        paths = [folder, *(os.path.join(folder, name) for name in os.listdir(folder))]
        for path in paths:
            os.utime(path, (0, 0))
        for number in range(9):
            pathlib.Path(folder, f"{number}.gone").symlink_to("nothing")  # like a file that has just vanished
        make_young(folder)
        assert min(os.stat(path).st_mtime for path in paths) > 0


def test_the_folder_of_a_killed_supervisor_is_removed_at_the_next_start_and_no_other(parent):
    (parent / "noria-without-a-lock").mkdir()
    (parent / "noria-elsewhere").symlink_to(parent / "noria-without-a-lock")
    killed = subprocess.run(
        [sys.executable, "-c", KILLED], env=os.environ | {"TMPDIR": str(parent)}, timeout=60, check=False
    )
    assert killed.returncode == -signal.SIGKILL
    assert len(os.listdir(parent)) == 3
    with private_folder() as first, private_folder() as second:
        assert sorted(os.listdir(parent)) == sorted(
            ["noria-elsewhere", "noria-without-a-lock", os.path.basename(first), os.path.basename(second)]
        )


def test_a_temporary_folder_that_cannot_be_written_to_is_rejected(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="TMPDIR"), private_folder():
        pass
