"""Backups: all rows of a registry as lines of JSON, from any kind of database into any other.

The first line says what the file is, each other one is a row; the last has the SHA-256 of all lines before it, so that
a damaged or cut file is noticed before anything is restored.
"""

import hashlib
import itertools
import os
import pathlib
import uuid
from collections.abc import Iterator
from typing import Any

import msgspec
import sqlalchemy as sa
from msgspec import Struct
from sqlalchemy import Connection, Engine

from noria.errors import RegistryError
from noria.registry.schema import SCHEMA, metadata
from noria.storage.database import write_transaction

_NUM_ROWS = 500  # rows of one statement


class _Header(Struct, frozen=True):
    registry_version: int  # the version of its tables
    created_at: float


class _Row(Struct, frozen=True):
    table: str
    row: dict[str, Any]


class _Footer(Struct, frozen=True):
    num_rows: int
    sha256: str


def backup(engine: Engine, file: pathlib.Path, now: float) -> int:
    """Write all rows, as of one instant, to a new file that only its owner reads. Returns their number.

    Raises RegistryError: the file exists, or cannot be written; there is no part of it then.
    """
    partial = file.with_name(f"{file.name}.{uuid.uuid4().hex}.part")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with engine.connect() as connection, open(descriptor, "wb") as opened:
            num_rows = _write(connection, opened.write, now)
            opened.flush()
            os.fsync(opened.fileno())
        os.link(partial, file)  # unlike `rename`, it replaces nothing
    except FileExistsError as error:
        raise RegistryError(f"{file} exists already; give a new name.") from error
    except OSError as error:
        raise RegistryError(f"{file} cannot be written: {error.strerror}.") from error
    finally:
        partial.unlink(missing_ok=True)
    return num_rows


def _write(connection: Connection, write: Any, now: float) -> int:
    if connection.dialect.name == "postgresql":  # SQLite's transactions see one instant anyway
        connection = connection.execution_options(isolation_level="REPEATABLE READ")
    digest, num_rows = hashlib.sha256(), 0
    for line in itertools.chain([msgspec.json.encode(_Header(SCHEMA.version, now)) + b"\n"], _row_lines(connection)):
        digest.update(line)
        num_rows += 1
        write(line)
    num_rows -= 1
    write(msgspec.json.encode(_Footer(num_rows, digest.hexdigest())) + b"\n")
    return num_rows


def _row_lines(connection: Connection) -> Iterator[bytes]:
    for table in metadata.sorted_tables:
        rows = connection.execution_options(yield_per=_NUM_ROWS).execute(sa.select(table).order_by(*table.primary_key))
        for row in rows:
            yield (
                msgspec.json.encode(_Row(str(table.name), {str(name): value for name, value in row._mapping.items()}))
                + b"\n"
            )


def restore(engine: Engine, file: pathlib.Path) -> int:
    """Insert all rows of a backup into an empty registry, in one transaction. Returns their number.

    Raises RegistryError: the file cannot be read, is damaged, or of another version; or the registry is not empty.
    """
    try:
        _check_file(file)
        with write_transaction(engine) as connection, file.open("rb") as opened:
            for table in metadata.sorted_tables:
                if connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one():
                    raise RegistryError(
                        "the registry is not empty, so nothing is restored. Name a new one, such as "
                        "--registry-database sqlite:////var/lib/noria/restored.sqlite."
                    )
            num_rows = _insert(connection, itertools.islice(opened, 1, None))
            _continue_counting(connection)
    except OSError as error:
        raise RegistryError(f"{file} cannot be read: {error.strerror}.") from error
    return num_rows


def _check_file(file: pathlib.Path) -> None:
    """Raise RegistryError unless the file is a whole backup of this version."""
    digest, last = hashlib.sha256(), b""
    with file.open("rb") as opened:
        header_line = opened.readline(10_000)
        try:
            header = msgspec.json.decode(header_line, type=_Header)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RegistryError(f"{file} is no backup of a registry, or one of a development version.") from error
        if header.registry_version != SCHEMA.version:
            raise RegistryError(
                f"{file} has tables of version {header.registry_version}; this Noria restores version "
                f"{SCHEMA.version}. Restore it with the Noria that wrote it; a newer one then migrates the database."
            )
        last, num_lines = header_line, 1
        for line in opened:
            digest.update(last)
            last, num_lines = line, num_lines + 1
    try:
        footer = msgspec.json.decode(last, type=_Footer)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RegistryError(f"{file} is cut off: its last line is missing. Use another backup.") from error
    if footer != _Footer(num_lines - 2, digest.hexdigest()):
        raise RegistryError(f"{file} is damaged: its content has not the SHA-256 that its last line says.")


def _insert(connection: Connection, lines: Iterator[bytes]) -> int:
    num_rows = 0
    rows = (msgspec.json.decode(line, type=_Row) for line in lines if line.startswith(b'{"table":'))
    for name, of_table in itertools.groupby(rows, lambda row: row.table):
        table = metadata.tables[name]
        while batch := [row.row for row in itertools.islice(of_table, _NUM_ROWS)]:
            connection.execute(table.insert(), batch)
            num_rows += len(batch)
    return num_rows


def _continue_counting(connection: Connection) -> None:
    """Let PostgreSQL count on from the rows' numbers; SQLite does by itself."""
    if connection.dialect.name != "postgresql":
        return
    for table in metadata.sorted_tables:
        column = next((column for column in table.primary_key if column.autoincrement is True), None)
        if column is not None:
            sequence = sa.func.pg_get_serial_sequence(table.name, column.name)
            last = sa.select(sa.func.coalesce(sa.func.max(column), 0) + 1).scalar_subquery()
            connection.execute(sa.select(sa.func.setval(sequence, last, False)))
