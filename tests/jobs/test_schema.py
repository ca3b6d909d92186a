"""Opening a database: many at once, of another version, out of reach; and what its setting may be."""

import subprocess
import sys

import pytest
import sqlalchemy as sa

from noria.errors import ConfigError
from noria.jobs.schema import about, database_url, open_database, write_transaction
from noria.jobs.store import JobStore
from waiting import TIMEOUT_S


def test_many_processes_may_open_an_empty_database_at_once(database, tmp_path, job):
    code = (
        "import sys, pathlib\n"
        "from noria.jobs.schema import database_url, open_database\n"
        "sys.stdin.readline()\n"
        "open_database(database_url(sys.argv[1], pathlib.Path('/nowhere'))).dispose()\n"
    )
    openers = [
        subprocess.Popen([sys.executable, "-c", code, database], stdin=subprocess.PIPE, text=True) for _ in range(6)
    ]
    for opener in openers:
        opener.stdin.write("now\n")
        opener.stdin.close()
    assert [opener.wait(TIMEOUT_S) for opener in openers] == [0] * 6
    store = JobStore(open_database(database_url(database, tmp_path)))
    record, created = store.accept(job(), 10, 1.0)
    assert (created, store.get(record.id)) == (True, record)
    store.close()


def test_a_database_of_another_version_is_refused_in_words(engine, database, tmp_path):
    with write_transaction(engine) as connection:
        connection.execute(about.update().values(value="99"))
    with pytest.raises(ConfigError, match="tables of version 99; this Noria knows version 1"):
        open_database(database_url(database, tmp_path))


def test_sqlite_writes_ahead_and_waits_for_the_disk(tmp_path):
    engine = open_database(database_url("auto", tmp_path / "new" / "folder"))
    with engine.connect() as connection:
        assert connection.execute(sa.text("PRAGMA journal_mode")).scalar() == "wal"
        assert connection.execute(sa.text("PRAGMA synchronous")).scalar() == 2  # FULL
    engine.dispose()
    assert (tmp_path / "new" / "folder" / "jobs.sqlite").exists()


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("nonsense", "not a database's URL"),
        ("mysql://host/name", "of the kind 'mysql'.*Allowed"),
        ("sqlite://", "which forgets"),
        ("sqlite:///:memory:", "which forgets"),
        ("postgresql://user:hunter2@host/name", "PGPASSFILE"),
        ("postgresql://host/name?password=hunter2", "PGPASSFILE"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_without_showing_a_password(setting, words, tmp_path):
    with pytest.raises(ConfigError, match=words) as caught:
        database_url(setting, tmp_path)
    assert "hunter2" not in str(caught.value)


def test_a_database_that_cannot_be_reached_is_refused_with_what_to_do(tmp_path):
    (tmp_path / "file").touch()
    for setting in ("postgresql://nobody@127.0.0.1:1/none", f"sqlite:///{tmp_path}/file/jobs.sqlite"):
        with pytest.raises(ConfigError, match=r"cannot be used: .*Set jobs\.database"):
            open_database(database_url(setting, tmp_path))


def test_a_file_that_is_no_database_is_refused(tmp_path):
    (tmp_path / "jobs.sqlite").write_text("this is a diary and no database, long enough to be read as one" * 99)
    with pytest.raises(ConfigError, match="not a database"):
        open_database(database_url("auto", tmp_path))
