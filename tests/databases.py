"""Fixtures: empty SQLite files, and databases of a real PostgreSQL server that is started once for all tests."""

import contextlib
import os
import shutil
import tempfile
import uuid
import warnings

import pytest
import sqlalchemy as sa

on_both = pytest.mark.parametrize("database", ["sqlite", "postgresql"], indirect=True)
"""A test of a statement that no other test executes on PostgreSQL, or of what happens at once."""


@pytest.fixture(scope="session")
def postgresql_server():
    """A PostgreSQL server started for these tests."""
    pgserver = pytest.importorskip("pgserver", reason="pgserver has no wheel for this Python")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pgserver.postgres_server.pg_ctl", without_timeout(pgserver.pg_ctl))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about XDG_RUNTIME_DIR, which is unset in containers
            create_postgresql_user()
            folder = tempfile.mkdtemp(prefix="noria-pg")  # a short path: the server's socket is in it
            server = pgserver.get_server(folder)
        # No test cuts the power. Without the writes that wait for the disk, a database is dropped ten times as fast.
        for setting in ("fsync", "full_page_writes"):
            server.psql(f"ALTER SYSTEM SET {setting} = off")
        server.psql("SELECT pg_reload_conf()")
        yield server
        server.cleanup()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def postgresql(postgresql_server):
    """The URL of the PostgreSQL server, with its first database."""
    return postgresql_server.get_uri()


@contextlib.contextmanager
def stopped(server):
    """Within this context the PostgreSQL server is gone, with all its connections, as after a crash."""
    from pgserver import postgres_server

    postgres_server.pg_ctl(["-w", "-m", "immediate", "stop"], pgdata=server.pgdata, user=server.system_user)
    try:
        yield
    finally:
        server.ensure_postgres_running()


def without_timeout(pg_ctl):
    """Drop the timeout of ten seconds that pgserver passes: a busy machine needs more.

    `pg_ctl --wait` itself has one of a minute.
    """

    def call(*args, timeout=None, **kwargs):
        return pg_ctl(*args, **kwargs)

    return call


def create_postgresql_user():
    """Create the user that PostgreSQL runs as where the tests run as root, holding pgserver's lock.

    pgserver itself does not: several workers on a new machine would each create the user, with different ids, and lose
    their folders.
    """
    if os.geteuid() == 0:
        from pgserver.postgres_server import PostgresServer
        from pgserver.utils import ensure_user_exists

        with PostgresServer._lock:
            ensure_user_exists("pgserver")


@pytest.fixture(scope="session")
def postgresql_database(postgresql):
    """The URL of a database that tests use one after another: to empty it costs a tenth of a new one."""
    with empty_database(postgresql) as url:
        yield url


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request, tmp_path):
    """The URL of an empty database; each test with this fixture runs on SQLite and on PostgreSQL."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/jobs.sqlite"
        return
    url = request.getfixturevalue("postgresql_database")
    yield url
    _execute_alone(url, "DROP SCHEMA public CASCADE", "CREATE SCHEMA public")


class TablesOnce:
    """A database of each kind in which `create(url)` has made tables; tests get its copy, or it emptied.

    To create them for each test costs more than most tests do. SQLite's file is in `folder`.
    """

    def __init__(self, create, folder):
        self.create, self.file, self._url = create, folder / "created.sqlite", None
        create(f"sqlite:///{self.file}")

    @contextlib.contextmanager
    def of(self, kind, tmp_path, request):
        """The URL of a database of this kind, whose tables are empty."""
        if kind == "sqlite":
            shutil.copy(self.file, tmp_path / "jobs.sqlite")
            yield f"sqlite:///{tmp_path}/jobs.sqlite"
            return
        if self._url is None:
            self._url = new_database(request.getfixturevalue("postgresql"))
            self.create(self._url)
        yield self._url
        tables = "SELECT tablename FROM pg_tables WHERE schemaname = 'public' AND tablename <> 'noria_schema_versions'"
        truncate = "EXECUTE (SELECT 'TRUNCATE ' || string_agg(tablename, ', ') || ' RESTART IDENTITY' FROM ({}) tables)"
        # A replica has no triggers, so also what is append-only can be emptied.
        _execute_alone(
            self._url, "SET session_replication_role = replica", f"DO $$ BEGIN {truncate.format(tables)}; END $$"
        )


def _execute_alone(url, *statements):
    """Execute statements once all other connections have ended: those that a test has left would hold its tables."""
    engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"), poolclass=sa.NullPool)
    with engine.begin() as connection:
        others = "datname = current_database() AND pid <> pg_backend_pid()"
        for statement in (f"SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE {others}", *statements):
            connection.execute(sa.text(statement))


@contextlib.contextmanager
def empty_database(server_url):
    """The URL of a new database of the PostgreSQL server at `server_url`, which is dropped at the end."""
    url = new_database(server_url)
    yield url
    _administer(server_url, f"DROP DATABASE {sa.make_url(url).database} WITH (FORCE)")


def new_database(server_url):
    """Create a database, which stays as long as the server; returns its URL."""
    name = f"noria_{uuid.uuid4().hex}"
    _administer(server_url, f"CREATE DATABASE {name}")
    return server_url.replace("postgres:@", "postgres@").replace("/postgres?", f"/{name}?")


def _administer(server_url, statement):
    url = server_url.replace("postgresql:", "postgresql+psycopg:")
    engine = sa.create_engine(url, isolation_level="AUTOCOMMIT", poolclass=sa.NullPool)
    with engine.connect() as connection:
        connection.execute(sa.text(statement))
