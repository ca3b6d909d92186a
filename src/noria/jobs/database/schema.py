"""The tables of jobs, their texts and start images, their events and their webhook deliveries.

A 202 response is a promise: `storage/database.py` makes each commit durable.
"""

import pathlib

from sqlalchemy import (
    BigInteger,
    Column,
    Engine,
    Float,
    Index,
    Integer,
    MetaData,
    Table,
    Text,
    UniqueConstraint,
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
    Column("text_bytes", BigInteger, nullable=False),  # 0: a job of images
    # Size of the start image of a job of images, as it is stored.
    Column("image_bytes", BigInteger, nullable=False),
    Column("client", Text, nullable=False),
    UniqueConstraint("made_by", "idempotency_key", name="noria_jobs_idempotency"),
    Index("noria_jobs_of", "made_by", "seq"),
    Index("noria_jobs_line", "status", "order_at"),
    Index("noria_jobs_ended", "completed_at"),
    Index("noria_jobs_turns", "status", "made_by", "order_at"),
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

# The texts of jobs that have not ended, and, as chunk 0, the start images of such jobs.
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
    Column("host", Text, nullable=False),
    Column("made_by", Text, nullable=False),
    Column("created_at", Float(53), nullable=False),
    # Whose share it takes: the API key, or the address.
    Column("client", Text, nullable=False),
    Index("noria_deliveries_claims", "due_at", "client", "host"),
    Index("noria_deliveries_ages", "created_at", "client"),
)


SCHEMA = database.Schema("jobs", setting="jobs.database", metadata=metadata)


def open_jobs_database(setting: str, data_folder: pathlib.Path, timeout_s: float = 10.0) -> Engine:
    """The database that `jobs.database` names, with the tables of jobs; `auto` is a SQLite file in `data_folder`.

    `timeout_s` is PostgreSQL's time for a statement.

    Raises ConfigError: see `storage.database`.
    """
    url = database.database_url(SCHEMA, setting, data_folder / "jobs.sqlite")
    # A connection for each thread, so that no thread waits for one; they are opened as they are needed.
    return database.open_database(SCHEMA, url, NUM_REQUEST_THREADS + NUM_WORKERS * NUM_WORKER_THREADS, timeout_s)
