"""Checks a registry: the database's own integrity, digests, what follows from history, and the files of models."""

import hashlib
import itertools
from collections.abc import Iterator
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlalchemy import Connection, Engine
from sqlalchemy.exc import DBAPIError

from noria.errors import NoriaError, RequestError, short_list
from noria.protocol.routes import Route, Target
from noria.registry.deployments.rows import read_routed, read_routes
from noria.registry.deployments.states import STATELESS, UNFINISHED, routes_of
from noria.registry.lineage.openlineage import DatasetRef, Event, fold, parse_event
from noria.registry.lineage.run_rows import STRUCK_OUT, EntryRow, IoRow, entry_rows, io_rows, run_row
from noria.registry.manifest import OnRead, differences, report_nothing
from noria.registry.model_folder import folder_of
from noria.registry.model_store import ModelStore
from noria.registry.schema import (
    alias_events,
    aliases,
    artifacts,
    dataset_versions,
    datasets,
    deployment_events,
    deployment_heads,
    deployments,
    endpoints,
    lineage_events,
    run_entries,
    run_io,
    runs,
    struck_events,
)

_NUM_ROWS = 500  # read at once
_MAX_NAMED = 3  # files of a folder in one message


def check(engine: Engine, *, with_files: bool = True, on_read: OnRead = report_nothing) -> Iterator[str]:
    """Yield a sentence for each thing that is wrong. `with_files` also reads all files of all models."""
    with engine.connect() as connection:
        damage = list(_check_sqlite(connection)) if connection.dialect.name == "sqlite" else []
        if damage:  # what follows could not be read
            yield from damage
            return
        yield from _check_events(connection)
        yield from _check_aliases(connection)
        yield from _check_manifests(connection)
        yield from _check_deployments(connection)
    if with_files:
        yield from _check_files(ModelStore(engine), on_read)


def _check_sqlite(connection: Connection) -> Iterator[str]:
    try:
        lines = connection.exec_driver_sql("PRAGMA integrity_check").scalars().all()
    except DBAPIError as error:  # it is itself damaged too much
        yield f"the database is damaged: {error.orig}. Restore a backup into a new one."
        return
    for line in lines:
        if line != "ok":
            yield f"the database is damaged: {line}. Restore a backup into a new one."
    for table, row, target, _ in connection.exec_driver_sql("PRAGMA foreign_key_check"):
        yield f"row {row} of {table} refers to a row of {target} that does not exist."


def _check_events(connection: Connection) -> Iterator[str]:
    """Check the digests of events, and that runs, inputs and outputs are what follows from them."""
    query = sa.select(lineage_events).order_by(lineage_events.c.run_id, lineage_events.c.seq)
    rows = connection.execution_options(yield_per=_NUM_ROWS).execute(query)
    seen = set()
    struck = set(connection.scalars(sa.select(struck_events.c.event_seq)))
    for run_id, of_run in itertools.groupby(rows, lambda row: row.run_id):
        events: list[Event] = []
        for row in of_run:
            try:
                event = parse_event(row.body.encode())
            except RequestError as error:
                yield f"event {row.seq} cannot be read: {error.message}"
                continue
            if event.digest != row.digest:
                yield f"event {row.seq} was changed: its digest is {event.digest}, not {row.digest}."
            if row.seq not in struck:
                events.append(event)
        if run_id is not None:
            seen.add(run_id)
            yield from _check_run(connection, run_id, events)
    for run_id in connection.scalars(sa.select(runs.c.run_id)):
        if run_id not in seen:
            yield f"run {run_id} has no events."


def _check_run(connection: Connection, run_id: str, events: list[Event]) -> Iterator[str]:
    """Check a run against its events that are not struck out."""
    state = fold(events) if events else None
    row = connection.execute(sa.select(runs).where(runs.c.run_id == run_id)).one_or_none()
    expected = {"status": STRUCK_OUT} if state is None else run_row(state)
    if row is None:
        yield f"run {run_id} has events and is missing."
        return
    for name, value in expected.items():
        if row._mapping[name] != value:
            yield f"run {run_id}: {name} is not what its events say."
    query = (
        sa.select(datasets.c.namespace, datasets.c.name, dataset_versions.c.version)
        .add_columns(run_io.c.direction, run_io.c.uri, run_io.c.at, run_io.c.digest)
        .join(dataset_versions, run_io.c.dataset_version_id == dataset_versions.c.id)
        .join(datasets)
        .where(run_io.c.run_id == run_id)
    )
    io = {
        IoRow(row.direction, DatasetRef(row.namespace, row.name, row.version), row.uri, row.at, row.digest)
        for row in connection.execute(query)
    }
    if io != set(() if state is None else io_rows(state)):
        yield f"run {run_id}: its inputs and outputs are not what its events say."
    of_run = connection.execute(sa.select(*run_entries.c[1:]).where(run_entries.c.run_id == run_id))
    if {EntryRow(*row) for row in of_run} != set(() if state is None else entry_rows(state)):
        yield f"run {run_id}: its parameters, metrics and error are not what its events say."


def _check_aliases(connection: Connection) -> Iterator[str]:
    expected: dict[tuple[Any, ...], Any] = {}
    for event in connection.execute(sa.select(alias_events).order_by(alias_events.c.seq)):
        expected[event.model_id, event.alias] = event.version_id
    stored = {(row.model_id, row.alias): row.version_id for row in connection.execute(sa.select(aliases))}
    for model_id, alias in sorted(expected.keys() | stored.keys()):
        if expected.get((model_id, alias)) != stored.get((model_id, alias)):
            yield f"the alias {alias} of model {model_id} names another version than its last event."


def _check_manifests(connection: Connection) -> Iterator[str]:
    for row in connection.execute(sa.select(artifacts)):
        if f"sha256:{hashlib.sha256(row.manifest.encode()).hexdigest()}" != row.digest:
            yield f"the manifest {row.digest} was changed."


def _check_deployments(connection: Connection) -> Iterator[str]:
    """Check that the heads of deployments are what their events say, and that the latest routes follow from them."""
    states: dict[int, str] = {}
    query = sa.select(deployment_events).order_by(deployment_events.c.deployment_id, deployment_events.c.number)
    for event in connection.execute(query):
        if event.type not in STATELESS:
            states[event.deployment_id] = event.type
    heads = sa.outerjoin(deployments, deployment_heads).join(endpoints, deployments.c.endpoint_id == endpoints.c.id)
    columns = (deployments.c.id, endpoints.c.name, deployment_heads.c.state, deployment_heads.c.finished_at)
    findings = []
    for row in connection.execute(sa.select(*columns).select_from(heads).order_by(deployments.c.id)):
        state = states.get(row.id)
        if state is None or row.state is None:
            findings.append(f"deployment {row.id} of {row.name} has no {'events' if state is None else 'state'}.")
        elif state != row.state or (row.finished_at is None) != (state in UNFINISHED):
            end = "not finished" if row.finished_at is None else "finished"
            findings.append(
                f"deployment {row.id} of {row.name} is {row.state}, {end}; its last event says that it is {state}."
            )
    yield from findings
    if findings:  # routes follow from the states
        return
    latest = read_routes(connection)
    if _without_urls(latest.routes) != _without_urls(routes_of(read_routed(connection))):
        yield f"the routes of generation {latest.generation} are not what the states of deployments say."


def _without_urls(routes: tuple[Route, ...]) -> list[Route]:
    """The same routes, whatever places of files were added since."""

    def without(target: Target | None) -> Target | None:
        return None if target is None else msgspec.structs.replace(target, urls=())

    return [
        msgspec.structs.replace(
            route, control=without(route.control), canary=without(route.canary), shadow=without(route.shadow)
        )
        for route in routes
    ]


def _check_files(store: ModelStore, on_read: OnRead) -> Iterator[str]:
    """Check that each version's files are as they were added, in at least one of its places."""
    problems: dict[str, list[str]] = {}
    for version in store.all_versions():
        if version.digest not in problems:
            manifest = store.manifest(version)
            found = [_problem(url, manifest, on_read) for url in version.urls]
            problems[version.digest] = [] if "" in found else found
        if problems[version.digest]:
            yield f"{version.name}: {' '.join(problems[version.digest])}"


def _problem(url: str, manifest: str, on_read: OnRead) -> str:
    """Return what is wrong with the files in a place; empty: nothing, or this machine cannot tell."""
    try:
        folder = folder_of(url)
        changed = [] if folder is None else differences(manifest, folder, on_read)
    except NoriaError as error:
        return error.message
    if not changed:
        return ""
    return f"in {url} {short_list(changed, _MAX_NAMED)} changed since it was added."
