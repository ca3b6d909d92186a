"""The rows that follow from a run's events: its own, its entries (parameters, metrics, the error), inputs and outputs.

An event writes the rows of what it states and no others, so its cost does not depend on how much its run has.
"""

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import sqlalchemy as sa
from sqlalchemy import Connection, Table

from noria.registry.lineage.openlineage import DatasetRef, Event, RunState, Statement, dataset_statements
from noria.registry.schema import dataset_versions, datasets, lineage_events, run_entries, run_io, runs
from noria.storage.database import dialect_insert

STRUCK_OUT = "struck_out"
"""The status of a run all of whose events are struck out."""
_NUM_KEYS = 500  # keys of one query
_ROW_BYTES = 200  # bytes of a row and its indexes, beside its texts: measured with SQLite, also by the tests


class IoRow(msgspec.Struct, frozen=True, order=True):
    """An input or output of a run."""

    direction: str  # "input" or "output"
    ref: DatasetRef
    uri: str | None
    at: float
    digest: str


class EntryRow(msgspec.Struct, frozen=True, order=True):
    """A parameter, a metric, or the error of a run."""

    field: str
    key: str
    name: str  # in JSON, as PostgreSQL stores no text with NUL
    value: str | None
    at: float
    digest: str


class RunChange(NamedTuple):
    """The changes that events make to a run."""

    run_id: str
    state: RunState  # that follows from all its events
    added: RunState  # whose rows are written: in `state` there are none
    columns: Mapping[str, object] = {}  # further ones of its row


def num_rows_of(event: Event) -> int:
    """Return how many rows an event writes at most: its own, its run's, and those of what it states."""
    stated = event.statement
    if stated is None:
        return 1
    num_entries = len(stated.params) + len(stated.metrics) + (stated.error is not None)
    return 2 + num_entries + 3 * (len(stated.inputs) + len(stated.outputs))  # datasets, their versions, `run_io`


def price_of(event: Event) -> int:
    """Return how many bytes of a database an event takes, at most by and large, with all rows that it writes.

    What it states is in its body and in those rows, of which a run's has the job twice.
    """
    num_stated = len(msgspec.json.encode(event.statement))
    return len(event.body.encode()) + 2 * num_stated + _ROW_BYTES * num_rows_of(event)


def run_row(state: RunState) -> Mapping[str, object]:
    """Return the columns of a run that follow from its state."""
    assert state.job is not None
    namespace, name = state.job.value
    return {
        "parent_id": state.parent and state.parent.value,
        "job_namespace": namespace,
        "job_name": name,
        "status": state.status,
        "started_at": state.first_at if state.started is None else state.started.at,
        "ended_at": state.ended and state.ended.at,
        "state": msgspec.json.encode(_head(state), order="sorted").decode(),
    }


def io_rows(state: RunState) -> list[IoRow]:
    """Return the inputs and outputs that follow from a state."""
    return sorted(
        IoRow(direction, ref, stated.value, stated.at, stated.digest)
        for direction, entries in (("input", state.inputs), ("output", state.outputs))
        for ref, stated in dataset_statements(entries).items()
    )


def entry_rows(state: RunState) -> list[EntryRow]:
    """Return the parameters, the metrics and the error that follow from a state."""
    errors = {} if state.error is None else {"": state.error}
    return sorted(
        EntryRow(field, _key(name), _json(name), _json_value(stated), stated.at, stated.digest)
        for field, entries in (("param", state.params), ("metric", state.metrics), ("error", errors))
        for name, stated in entries.items()
    )


def read_state(text: str) -> RunState | None:
    """Return what `runs.state` has; None: the run has no event that counts."""
    return msgspec.json.decode(text, type=RunState) if text else None


def write_runs(connection: Connection, changes: Sequence[RunChange], version_ids: Mapping[DatasetRef, int]) -> None:
    """Write the rows of runs, by a number of statements that does not depend on how many they are."""
    if not changes:
        return
    rows = [{"of_run": change.run_id, **run_row(change.state), **change.columns} for change in changes]
    connection.execute(runs.update().where(runs.c.run_id == sa.bindparam("of_run")), rows)
    entries = [
        {"run_id": change.run_id, **msgspec.structs.asdict(row)}
        for change in changes
        for row in entry_rows(change.added)
    ]
    _insert_latest(connection, run_entries, "value", entries)
    io = [
        {
            "run_id": change.run_id,
            "direction": row.direction,
            "dataset_version_id": version_ids[row.ref],
            "uri": row.uri,
            "at": row.at,
            "digest": row.digest,
        }
        for change in changes
        for row in io_rows(change.added)
    ]
    _insert_latest(connection, run_io, "uri", io)
    _delete_unversioned(
        connection, [change.run_id for change in changes if change.added.inputs or change.added.outputs]
    )


def rewrite_run(connection: Connection, run_id: str, state: RunState | None, owner: str) -> None:
    """Write all rows of a run anew; None: none of its events counts any more."""
    for table in (run_entries, run_io):
        connection.execute(table.delete().where(table.c.run_id == run_id))
    values: dict[str, Any] = {"owner": owner}
    if state is None:
        values |= {"status": STRUCK_OUT, "state": "", "parent_id": None, "ended_at": None}
    connection.execute(runs.update().where(runs.c.run_id == run_id).values(values))
    if state is not None:
        version_ids = dataset_version_ids(connection, refs_of([state]))
        write_runs(connection, [RunChange(run_id, state, state)], version_ids)


def body_bytes(connection: Connection) -> sa.ColumnElement[int]:
    """Return the length of an event's body in bytes, as SQL."""
    body = lineage_events.c.body
    if connection.dialect.name == "sqlite":
        return sa.func.length(sa.cast(body, sa.LargeBinary))  # octet_length is of SQLite 3.43
    return sa.func.octet_length(body)


def num_rows(connection: Connection, run_ids: Sequence[str]) -> Counter[str]:
    """Return how many entries, inputs and outputs each run has."""
    found: Counter[str] = Counter()
    for chunk in chunks(run_ids):
        for table in (run_entries, run_io):
            counts = sa.select(table.c.run_id, sa.func.count().label("num_rows")).where(table.c.run_id.in_(chunk))
            rows = connection.execute(counts.group_by(table.c.run_id))
            found.update({row.run_id: row.num_rows for row in rows})
    return found


def refs_of(states: Iterable[RunState]) -> set[DatasetRef]:
    """Return the versions of datasets that states name."""
    return {ref for state in states for entries in (state.inputs, state.outputs) for ref in dataset_statements(entries)}


def dataset_version_ids(connection: Connection, refs: Iterable[DatasetRef]) -> dict[DatasetRef, int]:
    """Return the ids of versions of datasets; those that are new are inserted.

    All transactions insert in one order, so that none waits for another in a circle.
    """
    by_dataset: dict[str, DatasetRef] = {}
    by_version: dict[str, DatasetRef] = {}
    for ref in refs:
        by_dataset[_key(ref.namespace, ref.name)] = ref
        by_version[_key(*ref)] = ref
    dataset_rows = [
        {"namespace": ref.namespace, "name": ref.name, "key": key} for key, ref in sorted(by_dataset.items())
    ]
    dataset_ids = _ids(connection, datasets, dataset_rows)
    version_rows = [
        {
            "dataset_id": dataset_ids[_key(ref.namespace, ref.name)],
            "version": ref.version,
            "digest": ref.digest,
            "key": key,
        }
        for key, ref in sorted(by_version.items())
    ]
    version_ids = _ids(connection, dataset_versions, version_rows)
    return {ref: version_ids[key] for key, ref in by_version.items()}


def _ids(connection: Connection, table: Table, rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the ids of rows by their `key`; those that are new are inserted."""
    keys = [row["key"] for row in rows]
    known = _known_ids(connection, table, keys)
    if new := [row for row in rows if row["key"] not in known]:
        connection.execute(dialect_insert(connection, table).on_conflict_do_nothing(), new)
        known |= _known_ids(connection, table, [row["key"] for row in new])
    return known


def _known_ids(connection: Connection, table: Table, keys: Sequence[str]) -> dict[str, int]:
    return {
        row.key: row.id
        for chunk in chunks(keys)
        for row in connection.execute(sa.select(table.c.key, table.c.id).where(table.c.key.in_(chunk)))
    }


def chunks(keys: Sequence[str]) -> Iterator[list[str]]:
    """Yield the keys, as many at a time as one query takes."""
    remaining = iter(keys)
    while chunk := list(itertools.islice(remaining, _NUM_KEYS)):
        yield chunk


def _insert_latest(connection: Connection, table: Table, value: str, rows: list[dict[str, Any]]) -> None:
    """Insert rows, each unless a later statement is there; one with a value comes before one without."""
    if not rows:
        return
    insert = dialect_insert(connection, table)
    new, old = insert.excluded, table.c
    is_later = sa.tuple_(new[value].is_not(None), new["at"], new["digest"]) > sa.tuple_(
        old[value].is_not(None), old["at"], old["digest"]
    )
    changed = {name: new[name] for name in (value, "at", "digest")}
    connection.execute(
        insert.on_conflict_do_update(index_elements=table.primary_key, set_=changed, where=is_later), rows
    )


def _delete_unversioned(connection: Connection, run_ids: Sequence[str]) -> None:
    """Delete inputs and outputs without a version where the run states one of the same dataset."""
    dataset = sa.tuple_(run_io.c.run_id, run_io.c.direction, dataset_versions.c.dataset_id)
    joined = run_io.join(dataset_versions)
    for chunk in chunks(run_ids):
        of_runs = run_io.c.run_id.in_(chunk)
        versioned = sa.select(*dataset).select_from(joined).where(of_runs, dataset_versions.c.version != "")
        unversioned = (
            sa.select(run_io.c.run_id, run_io.c.direction, run_io.c.dataset_version_id)
            .select_from(joined)
            .where(of_runs, dataset_versions.c.version == "", dataset.in_(versioned))
        )
        if found := connection.execute(unversioned).all():
            is_row = sa.and_(*(column == sa.bindparam(f"of_{column.name}") for column in run_io.primary_key))
            rows = [{f"of_{name}": value for name, value in row._mapping.items()} for row in found]
            connection.execute(run_io.delete().where(is_row), rows)


def _head(state: RunState) -> RunState:
    """Return a state without what has rows of its own, so that it has a bounded length."""
    return msgspec.structs.replace(state, error=None, params={}, metrics={}, inputs={}, outputs={})


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _json_value(stated: Statement) -> str | None:
    return None if stated.value is None else _json(stated.value)


def _key(*parts: str) -> str:
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()
