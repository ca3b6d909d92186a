"""Other users of the machine: they could once read the database of jobs, with all prompts, and all images."""

import os
import stat

import pytest

from frontend.conftest import folder, new_engine  # noqa: F401 - fixtures
from hostile.jobs_server import post_job, serving_jobs
from waiting import wait_until


@pytest.fixture(autouse=True)
def _no_umask():
    before = os.umask(0)
    yield
    os.umask(before)


def test_only_their_owner_reads_the_files_of_jobs(new_engine, tmp_path):  # noqa: F811
    with serving_jobs(new_engine, tmp_path) as (mallory, _, engine):
        engine.never_answers = False
        url = post_job(mallory).json()["urls"]["get"]
        wait_until(lambda: mallory.get(url).json()["status"] == "succeeded")
        data = tmp_path / "data"
        paths = [data, *data.rglob("*")]
        assert {".sqlite", ".sqlite-wal", ".png"} <= {path.suffix for path in paths}
        readable = {str(path): stat.filemode(path.stat().st_mode) for path in paths if path.stat().st_mode & 0o077}
        assert readable == {}


def test_a_data_folder_open_to_others_is_said(new_engine, tmp_path, caplog):  # noqa: F811
    (tmp_path / "data").mkdir(mode=0o755)
    with serving_jobs(new_engine, tmp_path):
        assert "data has the mode 755" in caplog.text
        assert "chmod -R go= " in caplog.text
