"""The database of jobs: created once, and named by `jobs.database`."""

import subprocess
import sys

from databases import (
    database,  # noqa: F401 - one without tables
    on_both,
)
from noria.jobs.database.schema import open_jobs_database
from noria.jobs.database.store import JobStore
from waiting import TIMEOUT_S

OPENERS = """
import os, pathlib, sys
from noria.jobs.database.schema import open_jobs_database

children = []
for _ in range(4):
    if not (child := os.fork()):
        open_jobs_database(sys.argv[1], pathlib.Path("/nowhere")).dispose()
        os._exit(0)
    children.append(child)
sys.exit(any(os.waitpid(child, 0)[1] for child in children))
"""


@on_both
def test_many_processes_may_open_an_empty_database_at_once(database, tmp_path, job):  # noqa: F811 - a fixture
    subprocess.run([sys.executable, "-c", OPENERS, database], check=True, timeout=TIMEOUT_S)
    store = JobStore(open_jobs_database(database, tmp_path))
    record, created = store.accept(job(), 10, 1.0)
    assert (created, store.get(record.id)) == (True, record)
    store.close()


def test_by_default_jobs_are_in_a_sqlite_file_of_the_data_folder(tmp_path):
    open_jobs_database("auto", tmp_path / "new" / "folder").dispose()
    assert (tmp_path / "new" / "folder" / "jobs.sqlite").exists()
