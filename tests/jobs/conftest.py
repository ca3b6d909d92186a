"""Databases for the suites about jobs: SQLite files, and a real PostgreSQL that is started once for all of them."""

import os
import shutil
import tempfile
import uuid
import warnings

import pytest
import sqlalchemy as sa

from noria.jobs.records import NewJob, new_job_id
from noria.jobs.schema import database_url, open_database
from noria.jobs.store import JobStore
from waiting import TIMEOUT_S


@pytest.fixture(scope="session")
def postgresql():
    """The URL of a PostgreSQL of our own, with its first database."""
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")  # of XDG_RUNTIME_DIR, which a container has not
        pgserver = pytest.importorskip("pgserver", reason="pgserver has no wheel for this Python")
        create_postgresql_user()
        patch.setattr("pgserver.postgres_server.pg_ctl", without_timeout(pgserver.pg_ctl))
        folder = tempfile.mkdtemp(prefix="noria-pg")  # short: its socket lies in it
        server = pgserver.get_server(folder)
    yield server.get_uri()
    server.cleanup()
    shutil.rmtree(folder, ignore_errors=True)


def without_timeout(pg_ctl):
    """As pgserver calls it, without its bound of ten seconds, which a busy machine may need: `pg_ctl --wait` has one of a minute."""

    def call(*args, timeout=None, **kwargs):
        return pg_ctl(*args, **kwargs)

    return call


def create_postgresql_user():
    """PostgreSQL does not run as root; there it has a user of its own. pgserver makes that without its lock: when several workers
    come to a new machine at once, each makes the user again, with another number, and takes from the others what their folders belong to.
    """
    if os.geteuid() == 0:
        from pgserver.postgres_server import PostgresServer
        from pgserver.utils import ensure_user_exists

        with PostgresServer._lock:
            ensure_user_exists("pgserver")


@pytest.fixture(params=["sqlite", "postgresql"])
def database(request, tmp_path):
    """The setting `jobs.database` of an empty database: each test that asks for one runs on both kinds."""
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path}/jobs.sqlite"
        return
    url = request.getfixturevalue("postgresql")
    name = f"noria_{uuid.uuid4().hex}"
    admin = sa.create_engine(url.replace("postgresql:", "postgresql+psycopg:"), isolation_level="AUTOCOMMIT")
    with admin.connect() as connection:
        connection.execute(sa.text(f"CREATE DATABASE {name}"))
    yield url.replace("postgres:@", "postgres@").replace("/postgres?", f"/{name}?")
    with admin.connect() as connection:
        connection.execute(sa.text(f"DROP DATABASE {name} WITH (FORCE)"))
    admin.dispose()


@pytest.fixture
def tracer(collector, monkeypatch):
    """Once it is closed, the collector has all its spans: a server waits for a second and a half, and then leaves them behind."""
    from noria.observe.traces.otlp import OtlpTracer

    monkeypatch.setattr("noria.observe.traces.otlp._CLOSE_WITHIN_S", TIMEOUT_S)
    opened = OtlpTracer(collector.endpoint, 1.0, "frontend-0")
    yield opened
    opened.close()


@pytest.fixture
def engine(database, tmp_path):
    opened = open_database(database_url(database, tmp_path))
    yield opened
    opened.dispose()


@pytest.fixture
def store(engine):
    return JobStore(engine)


@pytest.fixture(scope="session")
def job():
    """Makes jobs of the model `shapes`, version `v1`."""

    def new_job(**fields):
        usual = {
            "id": new_job_id(),
            "model": "shapes",
            "version": "v1",
            "input": b'{"prompt": "a red circle"}',
            "request": b'{"seed": 7}',
            "base_url": "http://noria.test/",
        }
        return NewJob(**(usual | fields))

    return new_job
