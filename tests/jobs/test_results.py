"""Files of jobs are complete or absent, and none is left behind; on a local folder and on another filesystem."""

import os
import pathlib
import subprocess
import sys
import uuid

import pytest

from noria.errors import ConfigError
from noria.jobs.results import ResultStore
from s3_server import running_s3

TWO_PROCESSES = """
import pathlib, sys
sys.path.append(sys.argv[1])
import fsspec
from noria.jobs.results import ResultStore

store = ResultStore("s3://results/noria", pathlib.Path("."))
store.save("job_a", 1, [b"first"], "png")
assert store.names("job_a") == ["1-0.png"]
other = fsspec.filesystem("s3", skip_instance_cache=True)  # knows as little of the first as another process
other.pipe_file("results/noria/job_a/2-0.png", b"second")
assert store.read("job_a", "2-0.png") == b"second"
"""


@pytest.fixture(params=["local", "memory"])
def results(request, tmp_path):
    setting = "auto" if request.param == "local" else f"memory://{uuid.uuid4().hex}"
    return ResultStore(setting, tmp_path)


def test_saved_files_can_be_read(results):
    names = results.save("job_a", 1, [b"first", b"second"], "png")
    assert names == ["1-0.png", "1-1.png"]
    assert [results.read("job_a", name) for name in names] == [b"first", b"second"]


def test_reading_a_missing_file_returns_none(results):
    assert results.read("job_a", "1-0.png") is None


def test_an_attempt_is_discarded_without_touching_another(results):
    results.save("job_a", 1, [b"first"], "png")
    results.save("job_a", 11, [b"eleventh"], "png")
    results.discard("job_a", 1)
    assert results.read("job_a", "1-0.png") is None
    assert results.read("job_a", "11-0.png") == b"eleventh"
    results.discard("job_a", 5)
    results.discard("job_b", 1)


def test_deleting_a_job_removes_the_files_of_every_attempt(results):
    results.save("job_a", 1, [b"first"], "png")
    results.save("job_a", 2, [b"second"], "png")
    results.delete("job_a")
    results.delete("job_a")
    assert results.read("job_a", "2-0.png") is None


def test_discarding_the_only_attempt_leaves_no_folder(tmp_path):
    results = ResultStore("auto", tmp_path)
    results.save("job_a", 1, [b"first"], "png")
    (tmp_path / "results" / "job_a" / ".1-1.png.part").write_bytes(b"ha")  # a file of a writer that was killed
    results.discard("job_a", 1)
    assert list((tmp_path / "results").iterdir()) == []


def test_a_local_file_appears_atomically(tmp_path, monkeypatch):
    results = ResultStore("auto", tmp_path)
    seen = []
    rename = pathlib.Path.rename
    monkeypatch.setattr(
        pathlib.Path, "rename", lambda self, to: seen.append((self.read_bytes(), to.exists())) or rename(self, to)
    )
    results.save("job_a", 1, [b"first"], "png")
    assert seen == [(b"first", False)]


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("s3://bucket/folder", "needs a package that is missing: Install s3fs"),
        ("nonsense://folder", "cannot be used: Protocol not known"),
        ("/proc/noria", "cannot be used"),
    ],
)
def test_an_unusable_folder_is_rejected_with_the_reason(setting, words, tmp_path):
    with pytest.raises(ConfigError, match=words):
        ResultStore(setting, tmp_path)


def test_a_file_url_names_a_local_folder(tmp_path):
    ResultStore(f"file://{tmp_path}/there/", pathlib.Path("/nowhere")).save("job_a", 1, [b"x"], "webp")
    assert (tmp_path / "there" / "job_a" / "1-0.webp").read_bytes() == b"x"
    assert oct(os.stat(tmp_path / "there").st_mode)[-3:] in ("700", "750", "755")


@pytest.mark.parametrize(
    "setting",
    [
        "ftp://noria:hunter2@files.example/results",
        "simplecache::sftp://noria:hunter2@files.example/results",
        "ftp://noria:hunter2@[files.example/results",
    ],
)
def test_a_password_in_the_url_is_rejected_and_not_shown(tmp_path, setting):
    with pytest.raises(ConfigError, match=r"^setting jobs\.results") as rejected:
        ResultStore(setting, tmp_path)
    assert "hunter2" not in str(rejected.value)


@pytest.mark.slow  # a real S3 server
@pytest.mark.timeout(900)
def test_what_another_process_wrote_since_the_folder_was_listed_is_found():
    with running_s3("results") as s3:
        command = [sys.executable, "-c", TWO_PROCESSES, str(s3.packages)]
        subprocess.run(command, env=os.environ | s3.environment, check=True)
