"""The jobs' tables, and a database that has them: SQLite or PostgreSQL, by the same statements.

**Durability.** An answer 202 is a promise, so a commit has to outlive not only a killed process (which WAL alone gives) but also a
lost machine: SQLite runs in WAL with `synchronous=FULL`, one fsync a commit. `NORMAL` would sync at checkpoints only and could forget the
last accepted jobs at a power cut. PostgreSQL's default, `synchronous_commit=on`, promises the same.

Several processes may open a database at once, also one that is still empty.
"""

import pathlib
import time
from contextlib import AbstractContextManager
from typing import Any

import sqlalchemy as sa
from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Engine,
    Float,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
)
from sqlalchemy.engine.url import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError

from noria.errors import ConfigError, short_repr
from noria.jobs.thread_offloader import NUM_REQUEST_THREADS, NUM_WORKER_THREADS

SCHEMA_VERSION = 1
_NUM_CONNECTIONS = (
    NUM_REQUEST_THREADS + NUM_WORKER_THREADS
)  # no thread waits for one; they are opened as they are needed

_BUSY_TIMEOUT_S = 20.0  # how long a writer of SQLite waits for the others; each holds the lock for milliseconds
_LOCK_KEY = 0x6E6F726961  # "noria": PostgreSQL's advisory lock around the making of tables
_WRITES_OPTION = "noria_writes"  # the execution option of a connection that will write

metadata = MetaData()

about = Table("noria_about", metadata, Column("key", Text, primary_key=True), Column("value", Text, nullable=False))

jobs = Table(
    "noria_jobs",
    metadata,
    Column("seq", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    Column("id", Text, nullable=False, unique=True),
    Column("status", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("version", Text, nullable=False),
    Column("input", Text, nullable=False),
    Column("request", Text, nullable=False),
    Column("base_url", Text, nullable=False),
    Column("webhook", Text),
    Column("webhook_events", Text, nullable=False),
    Column("made_by", Text, nullable=False),  # not null without a maker: two nulls would never be the same maker
    Column("idempotency_key", Text),
    Column("body_digest", Text, nullable=False),
    Column("created_at", Float(53), nullable=False),
    Column("order_at", Float(53), nullable=False),
    Column("not_before", Float(53), nullable=False),
    Column("started_at", Float(53)),
    Column("completed_at", Float(53)),
    Column("owner", Text),
    Column("lease_until", Float(53)),
    Column("attempt", Integer, nullable=False),
    Column("num_losses", Integer, nullable=False),
    Column("num_engine_losses", Integer, nullable=False),
    Column("last_event", Integer, nullable=False),
    Column("output", Text),
    Column("error", Text),
    Column("error_code", Text),
    Column("metrics", Text, nullable=False),
    UniqueConstraint("made_by", "idempotency_key", name="noria_jobs_idempotency"),
    Index("noria_jobs_of", "made_by", "seq"),
    Index("noria_jobs_line", "status", "order_at"),
    Index("noria_jobs_ended", "completed_at"),
    sqlite_autoincrement=True,  # a deleted job's number is never given again: cursors stay true
)

events = Table(
    "noria_job_events",
    metadata,
    Column("job_id", Text, primary_key=True),
    Column("seq", Integer, primary_key=True),
    Column("at", Float(53), nullable=False),
    Column("type", Text, nullable=False),
    Column("data", Text, nullable=False),
)

deliveries = Table(
    "noria_deliveries",
    metadata,
    Column("id", Text, primary_key=True),
    Column("url", Text, nullable=False),
    Column("body", Text, nullable=False),
    Column("num_tries", Integer, nullable=False),
    Column("due_at", Float(53), nullable=False),
    Index("noria_deliveries_due", "due_at"),
)


def database_url(setting: str, data_folder: pathlib.Path) -> URL:
    """What `jobs.database` means.

    Raises:
        ConfigError: not a URL, of another kind of database, or with a password in it.

    """
    if setting == "auto":
        return URL.create("sqlite", database=str(data_folder / "jobs.sqlite"))
    allowed = "Allowed: auto, sqlite:///FILE, postgresql://USER@HOST/NAME."
    try:
        url = make_url(setting)
    except (ArgumentError, ValueError) as error:  # not shown: it may hold a password
        raise ConfigError(f"setting jobs.database is not a database's URL. {allowed}") from error
    if url.password is not None or "password" in url.query:
        raise ConfigError(
            "setting jobs.database holds a password, and process listings would show it. Leave it out of the URL and set the "
            "environment variable PGPASSWORD or PGPASSFILE."
        )
    if url.drivername == "sqlite":
        if url.database in (None, "", ":memory:"):
            raise ConfigError(
                f"setting jobs.database is {short_repr(setting)}, which forgets; name a file: sqlite:////var/lib/noria/jobs.sqlite."
            )
        return url
    if url.drivername in ("postgresql", "postgres", "postgresql+psycopg"):
        return url.set(drivername="postgresql+psycopg")
    raise ConfigError(f"setting jobs.database is of the kind {short_repr(url.drivername)}. {allowed}")


def open_database(url: URL) -> Engine:
    """A pool of connections to a database that has the tables; they are made where it is empty.

    Raises:
        ConfigError: it cannot be reached or written, its driver is missing, or its tables are of another version.

    """
    try:
        if url.get_backend_name() == "sqlite":
            assert url.database is not None
            pathlib.Path(url.database).absolute().parent.mkdir(parents=True, exist_ok=True)
            engine = _create_sqlite_engine(url)
        else:
            engine = sa.create_engine(
                url, pool_pre_ping=True, pool_size=_NUM_CONNECTIONS, connect_args={"connect_timeout": 10}
            )
        with write_transaction(engine) as connection:
            _create_tables(connection)
            version = connection.scalar(sa.select(about.c.value).where(about.c.key == "schema"))
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"setting jobs.database names PostgreSQL, which needs the package {error.name}: pip install 'noria-serve[postgresql]'."
        ) from error
    except (DBAPIError, OSError) as error:
        reason = str(error.orig if isinstance(error, DBAPIError) else error).strip().partition("\n")[0]
        raise ConfigError(
            f"the jobs' database {url.render_as_string()} cannot be used: {reason}. Set jobs.database, or data_dir to a folder that can be "
            "written."
        ) from error
    if version != str(SCHEMA_VERSION):
        engine.dispose()
        raise ConfigError(
            f"the jobs' database {url.render_as_string()} has tables of version {version}; this Noria knows version {SCHEMA_VERSION}. "
            "Use the Noria that made it, or another database."
        )
    return engine


def write_transaction(engine: Engine) -> AbstractContextManager[Connection]:
    """A context with a connection whose transaction will write. In SQLite it waits for its turn at the start, not half-way."""
    return engine.execution_options(**{_WRITES_OPTION: True}).begin()


def _create_tables(connection: Connection) -> None:
    if connection.dialect.name == "postgresql":  # IF NOT EXISTS alone fails when two make the same table at once
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK_KEY)))
    metadata.create_all(connection)
    if connection.scalar(sa.select(sa.func.count()).select_from(about)) == 0:
        connection.execute(about.insert().values(key="schema", value=str(SCHEMA_VERSION)))


def _create_sqlite_engine(url: URL) -> Engine:
    engine = sa.create_engine(url, connect_args={"timeout": _BUSY_TIMEOUT_S}, pool_size=_NUM_CONNECTIONS)

    @sa.event.listens_for(engine, "connect")
    def set_up(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # sqlite3 begins nothing by itself; `begin` below does
        _enable_wal(connection)
        connection.execute("PRAGMA synchronous=FULL")

    @sa.event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get(_WRITES_OPTION, False)
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def _enable_wal(connection: Any) -> None:
    """Put the file into WAL mode, where it stays. SQLite does not wait for others here, so this does."""
    import sqlite3

    deadline = time.monotonic() + _BUSY_TIMEOUT_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode=WAL")
        except sqlite3.OperationalError as error:
            if "locked" not in str(error) or time.monotonic() > deadline:
                raise
            time.sleep(0.02)
        else:
            return
