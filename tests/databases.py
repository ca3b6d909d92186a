"""Fixtures: empty SQLite files, and databases of a real PostgreSQL server that is started once for all tests."""

import contextlib
import os
import shutil
import tempfile
import uuid
import warnings

import pytest
import sqlalchemy as sa


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
    engine = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"), poolclass=sa.NullPool)
    with engine.begin() as connection:
        # Connections that a test has left would keep its tables.
        others = "datname = current_database() AND pid <> pg_backend_pid()"
        connection.execute(sa.text(f"SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE {others}"))
        connection.execute(sa.text("DROP SCHEMA public CASCADE"))
        connection.execute(sa.text("CREATE SCHEMA public"))


@contextlib.contextmanager
def empty_database(server_url):
    """The URL of a new database of the PostgreSQL server at `server_url`, which is dropped at the end."""
    name = f"noria_{uuid.uuid4().hex}"
    admin = sa.create_engine(server_url.replace("postgresql:", "postgresql+psycopg:"), isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(sa.text(f"CREATE DATABASE {name}"))
    admin.dispose()
    yield server_url.replace("postgres:@", "postgres@").replace("/postgres?", f"/{name}?")
    with admin.connect() as connection:
        connection.execute(sa.text(f"DROP DATABASE {name} WITH (FORCE)"))
    admin.dispose()
