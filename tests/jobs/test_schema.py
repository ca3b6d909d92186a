"""The database of jobs: created once, and named by `jobs.database`."""

import pathlib
import subprocess
import sys

from noria.jobs.schema import open_jobs_database
from noria.jobs.store import JobStore
from waiting import TIMEOUT_S


def test_many_processes_may_open_an_empty_database_at_once(database, tmp_path, job):
    code = (
        "import sys, pathlib\n"
        "from noria.jobs.schema import open_jobs_database\n"
        "sys.stdin.readline()\n"
        "open_jobs_database(sys.argv[1], pathlib.Path('/nowhere')).dispose()\n"
    )
    openers = [
        subprocess.Popen([sys.executable, "-c", code, database], stdin=subprocess.PIPE, text=True) for _ in range(4)
    ]
    for opener in openers:
        opener.stdin.write("now\n")
        opener.stdin.close()
    assert [opener.wait(TIMEOUT_S) for opener in openers] == [0] * 4
    store = JobStore(open_jobs_database(database, tmp_path))
    record, created = store.accept(job(), 10, 1.0)
    assert (created, store.get(record.id)) == (True, record)
    store.close()


def test_by_default_jobs_are_in_a_sqlite_file_of_the_data_folder(tmp_path):
    open_jobs_database("auto", tmp_path / "new" / "folder").dispose()
    assert (tmp_path / "new" / "folder" / "jobs.sqlite").exists()


def test_a_database_of_the_first_version_is_opened_unchanged(tmp_path):
    """The table of versions has one row, whose key no release may rename: databases of older releases have it."""
    import sqlite3

    for _ in range(2):
        open_jobs_database("auto", pathlib.Path(tmp_path)).dispose()
    with sqlite3.connect(tmp_path / "jobs.sqlite") as connection:
        assert connection.execute("SELECT key, value FROM noria_about").fetchall() == [("schema", "1")]
    connection.close()
