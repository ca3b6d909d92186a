"""Records OpenLineage's events, and keeps runs, their datasets and the versions of these as the events have them.

Calls block: run them in threads. Any number of processes may call at once. `now` is Unix time in seconds.
"""

import hashlib
import itertools
from collections.abc import Mapping, Sequence

import msgspec
import sqlalchemy as sa
from sqlalchemy import Connection, Engine

from noria.registry.lineage.openlineage import DatasetRef, Event, RunState, fold, refs
from noria.registry.schema import dataset_versions, datasets, lineage_events, run_io, runs
from noria.storage.database import insert_if_new, write_transaction

_NO_RUN = ""


class LineageStore:
    """The lineage of a database opened by `schema.open_registry`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def record(self, events: Sequence[Event], received_from: str, now: float) -> int:
        """Record events; returns how many are new. The events of each run are one transaction."""
        num_new = 0
        for run_id, of_run in _by_run(events):
            with write_transaction(self._engine) as connection:
                num_new += _record_of_run(connection, run_id, of_run, received_from, now)
        return num_new

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()


def record_events(connection: Connection, events: Sequence[Event], received_from: str, now: float) -> int:
    """As `LineageStore.record`, in the caller's transaction."""
    return sum(_record_of_run(connection, run_id, of_run, received_from, now) for run_id, of_run in _by_run(events))


def _by_run(events: Sequence[Event]) -> list[tuple[str, list[Event]]]:
    """Return the events of each run. Everywhere in one order, as their rows are locked: no deadlock."""
    ordered = sorted(events, key=lambda event: (event.run_id or _NO_RUN, event.digest))
    return [
        (run_id, list(of_run)) for run_id, of_run in itertools.groupby(ordered, lambda each: each.run_id or _NO_RUN)
    ]


def _record_of_run(connection: Connection, run_id: str, events: list[Event], received_from: str, now: float) -> int:
    state = _lock_run(connection, run_id) if run_id else None
    new = [
        event
        for event in events
        if insert_if_new(
            connection,
            lineage_events,
            digest=event.digest,
            run_id=event.run_id,
            at=event.at,
            received_at=now,
            received_from=received_from,
            body=event.body,
        )
    ]
    if run_id and new:
        write_run(connection, run_id, fold(new, state))
    return len(new)


def _lock_run(connection: Connection, run_id: str) -> RunState | None:
    """Return the state of a run, whose row is this transaction's now; None if it is new."""
    blank = {"job_namespace": "", "job_name": "", "status": "unknown", "state": ""}
    if insert_if_new(connection, runs, run_id=run_id, **blank):
        return None
    state = connection.execute(sa.select(runs.c.state).where(runs.c.run_id == run_id).with_for_update()).scalar_one()
    return msgspec.json.decode(state, type=RunState)


def write_run(connection: Connection, run_id: str, state: RunState) -> None:
    """Write what `state` says into a run's row and its inputs and outputs."""
    assert state.job is not None, "every event of a run names its job"
    connection.execute(runs.update().where(runs.c.run_id == run_id).values(run_row(state)))
    connection.execute(run_io.delete().where(run_io.c.run_id == run_id))
    for row in io_rows(state):
        version_id = _dataset_version(connection, row.ref)
        connection.execute(
            run_io.insert().values(run_id=run_id, direction=row.direction, dataset_version_id=version_id, uri=row.uri)
        )


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
        "state": msgspec.json.encode(state, order="sorted").decode(),
    }


class IoRow(msgspec.Struct, frozen=True, order=True):
    """An input or output of a run."""

    direction: str  # "input" or "output"
    ref: DatasetRef
    uri: str | None


def io_rows(state: RunState) -> list[IoRow]:
    """Return the inputs and outputs that follow from a state, in one order everywhere: no deadlock."""
    directions = {"input": state.inputs, "output": state.outputs}
    rows = [
        IoRow(direction, ref, uri) for direction, entries in directions.items() for ref, uri in refs(entries).items()
    ]
    return sorted(rows, key=lambda row: (row.ref, row.direction))


def _dataset_version(connection: Connection, ref: DatasetRef) -> int:
    """Return the id of a version, which is inserted if it is new."""
    dataset_key, version_key = _key(ref.namespace, ref.name), _key(*ref)
    insert_if_new(connection, datasets, namespace=ref.namespace, name=ref.name, key=dataset_key)
    dataset_id = connection.execute(sa.select(datasets.c.id).where(datasets.c.key == dataset_key)).scalar_one()
    values = {"dataset_id": dataset_id, "version": ref.version, "digest": ref.digest, "key": version_key}
    insert_if_new(connection, dataset_versions, **values)
    version = sa.select(dataset_versions.c.id).where(dataset_versions.c.key == version_key)
    found: int = connection.execute(version).scalar_one()
    return found


def _key(*parts: str) -> str:
    return hashlib.sha256(msgspec.json.encode(parts)).hexdigest()
