"""The database of jobs: created once, and named by `jobs.database`."""

import subprocess
import sys

import sqlalchemy as sa

from databases import check_tables
from noria.jobs.database.schema import metadata, open_jobs_database
from noria.jobs.database.store import JobStore
from noria.storage.database import write_transaction
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


def test_many_processes_may_open_an_empty_database_at_once(database, tmp_path, job):
    subprocess.run([sys.executable, "-c", OPENERS, database], check=True, timeout=TIMEOUT_S)
    store = JobStore(open_jobs_database(database, tmp_path))
    record, created = store.accept(job(), 10, 1.0)
    assert (created, store.get(record.id)) == (True, record)
    store.close()


def test_by_default_jobs_are_in_a_sqlite_file_of_the_data_folder(tmp_path):
    open_jobs_database("auto", tmp_path / "new" / "folder").dispose()
    assert (tmp_path / "new" / "folder" / "jobs.sqlite").exists()


def test_a_database_of_the_first_version_is_migrated_and_keeps_its_jobs(database, tmp_path, job):
    """The table of versions has one row, whose key no release may rename: databases of older releases have it."""
    engine = open_jobs_database(database, tmp_path)
    record, _ = JobStore(engine).accept(job(made_by="alice", client="the key 'alice'"), 10, 1.0)
    with write_transaction(engine) as connection:
        connection.execute(sa.text("DROP INDEX noria_jobs_turns"))
        connection.execute(sa.text("DROP INDEX noria_deliveries_claims"))
        connection.execute(sa.text("DROP INDEX noria_deliveries_ages"))
        connection.execute(sa.text("CREATE INDEX noria_deliveries_due ON noria_deliveries (due_at)"))
        for name in ("host", "made_by", "created_at", "client"):
            connection.execute(sa.text(f"ALTER TABLE noria_deliveries DROP COLUMN {name}"))
        for name in ("text_bytes", "image_bytes", "client"):
            connection.execute(sa.text(f"ALTER TABLE noria_jobs DROP COLUMN {name}"))
        connection.execute(sa.text("DROP TABLE noria_job_texts"))
        connection.execute(sa.text("UPDATE noria_about SET value = '1' WHERE key = 'schema'"))
    engine.dispose()
    for _ in range(2):
        engine = open_jobs_database(database, tmp_path)
        assert JobStore(engine).get(record.id) == record
        assert JobStore(engine).chunk(record.id, 0) is None
        with engine.connect() as connection:
            assert connection.execute(sa.text("SELECT key, value FROM noria_about")).all() == [("schema", "7")]
        check_tables(engine, metadata)
        engine.dispose()
