"""The tables of jobs, their texts and start images, their events and their webhook deliveries.

A 202 response is a promise: `storage/database.py` makes each commit durable.
"""

import pathlib

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
    text,
)

from noria.jobs.thread_offloader import NUM_REQUEST_THREADS, NUM_WORKER_THREADS, NUM_WORKERS
from noria.storage import database

metadata = MetaData()

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
    # The name of the API key; empty without one, not null: a unique constraint treats two nulls as different.
    Column("made_by", Text, nullable=False),
    Column("idempotency_key", Text),
    Column("body_digest", Text, nullable=False),
    Column("created_at", Float(53), nullable=False),
    Column("order_at", Float(53), nullable=False),  # the position in the queue: `records.queue_order`
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
    Column("text_bytes", BigInteger, nullable=False, server_default="0"),  # since version 5; 0: a job of images
    # Size of the start image of a job of images, as it is stored. Since version 6.
    Column("image_bytes", BigInteger, nullable=False, server_default="0"),
    Column("client", Text, nullable=False, server_default=""),  # since version 7
    UniqueConstraint("made_by", "idempotency_key", name="noria_jobs_idempotency"),
    Index("noria_jobs_of", "made_by", "seq"),
    Index("noria_jobs_line", "status", "order_at"),
    Index("noria_jobs_ended", "completed_at"),
    Index("noria_jobs_turns", "status", "made_by", "order_at"),  # since version 2
    sqlite_autoincrement=True,  # numbers of deleted jobs are not reused: cursors of pages stay valid
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

# The texts of jobs that have not ended, and, as chunk 0, the start images of such jobs. Since version 5.
texts = Table(
    "noria_job_texts",
    metadata,
    Column("job_id", Text, primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("chunk", Text, nullable=False),
)

deliveries = Table(
    "noria_deliveries",
    metadata,
    Column("id", Text, primary_key=True),
    Column("url", Text, nullable=False),
    Column("body", Text, nullable=False),
    Column("num_tries", Integer, nullable=False),
    Column("due_at", Float(53), nullable=False),
    # Since version 2; empty in rows that are older.
    Column("host", Text, nullable=False, server_default=""),
    Column("made_by", Text, nullable=False, server_default=""),
    Column("created_at", Float(53), nullable=False, server_default="0"),  # since version 4
    # Whose share it takes: the API key, or the address. Since version 7, as is the column of the indexes.
    Column("client", Text, nullable=False, server_default=""),
    Index("noria_deliveries_claims", "due_at", "client", "host"),
    Index("noria_deliveries_ages", "created_at", "client"),
)


def _migrate_to_2(connection: Connection) -> None:
    """Add what turns of keys need, and the shares of hosts and keys in deliveries.

    Without the index, counting the queued jobs of a key took 31 ms for each new job among 10,000; with it 3.5 ms.
    """
    next(index for index in jobs.indexes if index.name == "noria_jobs_turns").create(connection)
    for name in ("host", "made_by"):
        connection.execute(text(f"ALTER TABLE noria_deliveries ADD COLUMN {name} TEXT NOT NULL DEFAULT ''"))


def _migrate_to_3(connection: Connection) -> None:
    """Let claims of deliveries skip those of hosts and keys that have their share within the index.

    With the index of `due_at` alone, skipping 100,000 took 220 ms; with this one 12 ms.
    """
    connection.execute(text("DROP INDEX noria_deliveries_due"))
    connection.execute(text("CREATE INDEX noria_deliveries_claims ON noria_deliveries (due_at, made_by, host)"))


def _migrate_to_4(connection: Connection) -> None:
    """Let deliveries be counted by key, and expire. The age of those that exist counts from when they are due."""
    connection.execute(text("ALTER TABLE noria_deliveries ADD COLUMN created_at FLOAT NOT NULL DEFAULT 0"))
    connection.execute(text("UPDATE noria_deliveries SET created_at = due_at"))
    connection.execute(text("CREATE INDEX noria_deliveries_ages ON noria_deliveries (created_at, made_by)"))


def _migrate_to_5(connection: Connection) -> None:
    texts.create(connection)
    connection.execute(text("ALTER TABLE noria_jobs ADD COLUMN text_bytes BIGINT NOT NULL DEFAULT 0"))


def _migrate_to_6(connection: Connection) -> None:
    """Let the bytes of start images be counted."""
    connection.execute(text("ALTER TABLE noria_jobs ADD COLUMN image_bytes BIGINT NOT NULL DEFAULT 0"))


def _migrate_to_7(connection: Connection) -> None:
    """Give each client, also without keys, its share of the deliveries. Older rows without a key share one."""
    for table in ("noria_jobs", "noria_deliveries"):
        connection.execute(text(f"ALTER TABLE {table} ADD COLUMN client TEXT NOT NULL DEFAULT ''"))
        # as `concurrency_limits.client_id` names keys, whose names need no escapes
        of_key = f"UPDATE {table} SET client = 'the key ''' || made_by || '''' WHERE made_by <> ''"  # noqa: S608
        connection.execute(text(of_key))
    for index in deliveries.indexes:
        connection.execute(text(f"DROP INDEX {index.name}"))
        index.create(connection)


SCHEMA = database.Schema(
    "jobs",
    setting="jobs.database",
    version_key="schema",
    metadata=metadata,
    migrations=(_migrate_to_2, _migrate_to_3, _migrate_to_4, _migrate_to_5, _migrate_to_6, _migrate_to_7),
)


def open_jobs_database(setting: str, data_folder: pathlib.Path, timeout_s: float = 10.0) -> Engine:
    """The database that `jobs.database` names, with the tables of jobs; `auto` is a SQLite file in `data_folder`.

    `timeout_s` is PostgreSQL's time for a statement.

    Raises ConfigError: see `storage.database`.
    """
    url = database.database_url(SCHEMA, setting, data_folder / "jobs.sqlite")
    # A connection for each thread, so that no thread waits for one; they are opened as they are needed.
    return database.open_database(SCHEMA, url, NUM_REQUEST_THREADS + NUM_WORKERS * NUM_WORKER_THREADS, timeout_s)
