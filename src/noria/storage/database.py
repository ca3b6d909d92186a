"""Opens SQL databases: SQLite or PostgreSQL, by the same statements. Knows no table but the one of schema versions.

**Time.** `timed_connection.py` bounds the time of each statement, also if PostgreSQL does not respond.

**Durability.** A commit must survive a killed process (WAL alone gives that) and also a power failure: SQLite runs in
WAL mode with `synchronous=FULL`, one fsync a commit. `NORMAL` would sync at checkpoints only and could lose the last
commits at a power failure. PostgreSQL's default, `synchronous_commit=on`, promises the same.

**Concurrency.** Several processes may open a database at once, even an empty one: each creates or migrates the tables
under a lock, or finds them done.
"""

import contextlib
import pathlib
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy import Column, Connection, Engine, Integer, MetaData, Table, Text
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.engine.url import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, OperationalError

from noria.errors import ConfigError, UnavailableNow, short_repr
from noria.storage.private_files import create_private_file, make_private_folder
from noria.storage.write_order import WriteOrder

_BUSY_TIMEOUT_S = 20.0  # how long a writer of SQLite waits for the others; each holds the lock for milliseconds
_CONNECT_TIMEOUT_S = 4  # to PostgreSQL
_MIGRATION_TIMEOUT_S = 600.0  # limit of statements that create or change tables, or wait for another process that does
_LOCK_KEY = 0x6E6F726961  # "noria": PostgreSQL's advisory lock around creating and migrating tables
_FILE_IS_GONE = "its file was deleted or replaced while it was in use; start the server again"
_WRITES_OPTION = "noria_writes"  # the execution option of a connection that will write
_ORDER_OPTION = "noria_write_order"  # option of an engine for SQLite: its `WriteOrder`
_LIMITS_OPTION = "noria_limits"  # option of an engine for PostgreSQL: its `StatementLimits`

_versions_metadata = MetaData()

# The version of each schema in this database, by `Schema.title`. No release may rename the table or a title.
schema_versions = Table(
    "noria_schema_versions",
    _versions_metadata,
    Column("schema", Text, primary_key=True),
    Column("version", Integer, nullable=False),
)

Migration = Callable[[Connection], None]


@dataclass(frozen=True)
class Schema:
    """The tables of one part of Noria. Several schemas may share a database; each has a version of its own.

    The first release has version 1. `migrations[n]` turns version n + 1 into version n + 2, within the transaction that
    also records the new version.
    """

    title: str  # in messages, and of its row of `schema_versions`: "jobs"
    setting: str  # names the database in the configuration: "jobs.database"
    metadata: MetaData
    migrations: tuple[Migration, ...] = ()
    orders_writers: bool = False  # some writers yield to the others: see `write_order.py`

    @property
    def version(self) -> int:
        """The version that this Noria reads and writes."""
        return 1 + len(self.migrations)


def database_url(schema: Schema, value: str, auto_file: pathlib.Path) -> URL:
    """The URL that `value`, of the setting `schema.setting`, means; `auto` is the SQLite file `auto_file`.

    Raises ConfigError: not a URL, an unsupported kind of database, an in-memory database, or a password in the URL.
    """
    if value == "auto":
        return URL.create("sqlite", database=str(auto_file))
    allowed = "Allowed: auto, sqlite:///FILE, postgresql://USER@HOST/NAME."
    try:
        url = make_url(value)
    except (ArgumentError, ValueError) as error:  # the value is not quoted: it may hold a password
        raise ConfigError(f"setting {schema.setting} is not a database URL. {allowed}") from error
    if url.password is not None or "password" in url.query:
        raise ConfigError(
            f"setting {schema.setting} holds a password, and process listings would show it. Remove it from the URL "
            "and set the environment variable PGPASSWORD or PGPASSFILE."
        )
    if url.drivername == "sqlite":
        if url.database in (None, "", ":memory:"):
            raise ConfigError(
                f"setting {schema.setting} is {short_repr(value)}, an in-memory database, which is lost at exit. "
                f"Name a file: sqlite:////var/lib/noria/{schema.title}.sqlite."
            )
        return url
    if url.drivername in ("postgresql", "postgres", "postgresql+psycopg"):
        return url.set(drivername="postgresql+psycopg")
    raise ConfigError(f"setting {schema.setting} is of the kind {short_repr(url.drivername)}. {allowed}")


def open_database(schema: Schema, url: URL, num_connections: int, timeout_s: float = 10.0) -> Engine:
    """A pool of up to `num_connections` connections to a database whose tables are those of `schema`.

    A statement that PostgreSQL does not answer within `timeout_s` fails with an OperationalError. Creates the tables in
    an empty database and migrates those of an older version.

    Raises ConfigError: the database cannot be written, its driver is missing, or no version that this Noria knows made
    its tables; UnavailableNow if PostgreSQL cannot be reached.
    """
    try:
        engine = _create_engine(url, num_connections)
        try:
            with write_transaction(engine) as connection:
                _prepare_tables(connection, schema, url)
            if (limits := engine.get_execution_options().get(_LIMITS_OPTION)) is not None:
                limits.timeout_s = timeout_s
            if schema.orders_writers and url.get_backend_name() == "sqlite":
                engine.update_execution_options(**{_ORDER_OPTION: WriteOrder(file_of(url))})
        except BaseException:
            engine.dispose()
            raise
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"setting {schema.setting} names PostgreSQL, which needs the package {error.name}: pip install "
            "'noria-serve[postgresql]'."
        ) from error
    except (DBAPIError, OSError) as error:
        reason = str(error.orig if isinstance(error, DBAPIError) else error).strip().partition("\n")[0]
        message = f"the {schema.title} database {url.render_as_string()} cannot be used: {reason}."
        if url.get_backend_name() == "sqlite":
            raise ConfigError(f"{message} Set {schema.setting}, or set data_dir to a writable folder.") from error
        kind = UnavailableNow if isinstance(error, OperationalError) else ConfigError
        raise kind(f"{message} Check that PostgreSQL runs and lets this user in, or set {schema.setting}.") from error
    return engine


@contextlib.contextmanager
def write_transaction(engine: Engine, *, yields: bool = False) -> Iterator[Connection]:
    """A context with a connection whose transaction will write.

    In SQLite it takes the write lock at its start, not half-way; one that `yields` after all others that wait for it,
    if the schema has an order.
    """
    order = engine.get_execution_options().get(_ORDER_OPTION)
    turn = contextlib.nullcontext() if order is None else order.turn(yields=yields)
    with turn, engine.execution_options(**{_WRITES_OPTION: True}).begin() as connection:
        yield connection


def dialect_insert(connection: Connection, table: Table) -> Any:
    """Return an INSERT that can say `ON CONFLICT`, which both kinds of databases have in the same form."""
    return (postgresql if connection.dialect.name == "postgresql" else sqlite).insert(table)


def insert_if_new(connection: Connection, table: Table, **values: Any) -> bool:
    """Insert a row, unless there is one with the same key. Returns whether it is inserted."""
    insert = dialect_insert(connection, table).values(values).on_conflict_do_nothing()
    return connection.execute(insert.returning(*table.primary_key)).first() is not None


def insert_new(connection: Connection, table: Table, key: Column[str], rows: Sequence[Mapping[str, Any]]) -> set[str]:
    """Insert many rows but those whose key is there; returns the values of `key` of those that are inserted."""
    if not rows:
        return set()
    insert = dialect_insert(connection, table).on_conflict_do_nothing().returning(key)
    return set(connection.scalars(insert, rows))


def interrupt(engine: Engine) -> None:
    """Fail all statements that wait for PostgreSQL, and all later ones: the process is about to end."""
    if (limits := engine.get_execution_options().get(_LIMITS_OPTION)) is not None:
        limits.interrupted = True


def _prepare_tables(connection: Connection, schema: Schema, url: URL) -> None:
    """Create or migrate the tables. Raises ConfigError, and changes nothing, if their version is unknown."""
    if connection.dialect.name == "postgresql":  # IF NOT EXISTS alone fails when two create the same table at once
        connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK_KEY)))
    _versions_metadata.create_all(connection)
    is_schema = schema_versions.c.schema == schema.title
    version = connection.scalar(sa.select(schema_versions.c.version).where(is_schema))
    if version is None and schema.metadata.tables.keys().isdisjoint(sa.inspect(connection).get_table_names()):
        schema.metadata.create_all(connection)
        connection.execute(schema_versions.insert().values(schema=schema.title, version=schema.version))
        return
    if version is None or not 1 <= version <= schema.version:
        found = "a development version" if version is None else f"version {version}"
        raise ConfigError(
            f"the {schema.title} database {url.render_as_string()} has tables of {found}; those of this Noria are of "
            f"version {schema.version}. Nothing is changed. Start the Noria that made them, or name another database "
            f"in {schema.setting}."
        )
    if version < schema.version:
        for migrate in schema.migrations[version - 1 :]:
            migrate(connection)
        connection.execute(schema_versions.update().where(is_schema).values(version=schema.version))


def _create_engine(url: URL, num_connections: int) -> Engine:
    if url.get_backend_name() != "sqlite":
        return _create_postgresql_engine(url, num_connections)
    assert url.database is not None
    file = file_of(url)
    make_private_folder(file.parent)
    files: tuple[pathlib.Path, ...] = ()
    if not url.database.startswith("file:"):  # SQLite's own URLs
        create_private_file(file)  # SQLite gives its other files the same mode
        files = file, file.with_name(f"{file.name}-wal")
    engine = sa.create_engine(url, connect_args={"timeout": _BUSY_TIMEOUT_S}, pool_size=num_connections)
    opened: set[int] = set()  # the ids of connections, as long as they are open
    identities: list[tuple[int, int] | None] = []  # identities of `files`, which stay as long as a connection is open

    @sa.event.listens_for(engine, "connect")
    def set_up(connection: Any, _record: Any) -> None:
        connection.isolation_level = None  # sqlite3 begins no transaction by itself; `begin` below does
        _enable_wal(connection)
        connection.execute("PRAGMA synchronous=FULL")
        connection.execute("PRAGMA foreign_keys=ON")
        connection.execute("PRAGMA user_version").fetchone()  # opens the log of writes
        if not opened:
            identities[:] = [_identity(each) for each in files]
        opened.add(id(connection))

    @sa.event.listens_for(engine, "close")
    def close(connection: Any, _record: Any) -> None:
        opened.discard(id(connection))

    @sa.event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        writes = connection.get_execution_options().get(_WRITES_OPTION, False)
        if identities != [_identity(each) for each in files]:
            raise OperationalError(None, None, sqlite3.OperationalError(_FILE_IS_GONE))
        connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")

    return engine


def _identity(file: pathlib.Path) -> tuple[int, int] | None:
    """Return what distinguishes a file from others of the same name; None: there is none.

    SQLite goes on with a file that was deleted or replaced, and whatever it commits is lost with its last connection.
    """
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def file_of(url: URL) -> pathlib.Path:
    """Return the file of a SQLite database."""
    assert url.database is not None
    return pathlib.Path(url.database.removeprefix("file:").partition("?")[0]).absolute()


def _create_postgresql_engine(url: URL, num_connections: int) -> Engine:
    from noria.storage.timed_connection import StatementLimits, TimedConnection

    limits = StatementLimits(_MIGRATION_TIMEOUT_S)
    engine = sa.create_engine(
        url,
        pool_pre_ping=True,
        pool_size=num_connections,
        connect_args={"connect_timeout": _CONNECT_TIMEOUT_S},
        execution_options={_LIMITS_OPTION: limits},
    )

    @sa.event.listens_for(engine, "do_connect")
    def connect(_dialect: Any, _record: Any, arguments: list[Any], parameters: dict[str, Any]) -> TimedConnection:
        return TimedConnection.open(limits, *arguments, **parameters)

    return engine


def _enable_wal(connection: Any) -> None:
    """Put the file into WAL mode, where it stays. SQLite ignores its busy timeout for this statement, so retry here."""
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
