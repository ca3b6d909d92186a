"""Records OpenLineage's events, and keeps runs, their datasets and the versions of these as the events have them.

A run belongs to who sent its first event, as long as one of the sender's events counts: events of others are rejected,
but for those that an operator adds. What a run and a sender may keep is bounded, and what one call writes. Calls block:
run them in threads. Any number of processes may call at once. `now` is Unix time in seconds.
"""

import itertools
import logging
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import NamedTuple

import sqlalchemy as sa
from sqlalchemy import Connection, Engine

from noria.errors import BodyTooLarge, ForeignRun, InvalidField, RegistryError
from noria.observe.logs.log_record import fields
from noria.registry.changes import Change
from noria.registry.lineage.openlineage import Event, RunState, fold
from noria.registry.lineage.run_rows import (
    RunChange,
    chunks,
    dataset_version_ids,
    num_rows,
    num_rows_of,
    price_of,
    read_state,
    refs_of,
    write_runs,
)
from noria.registry.lineage.struck_events import free, is_closed_to, take_over
from noria.registry.schema import lineage_events, lineage_senders, runs
from noria.storage.database import dialect_insert, insert_new, write_transaction

MAX_EVENTS, MAX_BYTES, MAX_ENTRIES = 10_000, 16 * 2**20, 10_000
"""Limits of a run: its events, the bytes of their bodies, and its parameters, metrics, inputs and outputs together."""

MAX_ROWS = 10_000
"""Rows that the events of one call write (`num_rows_of`). All other writers of SQLite wait until they are written."""

MAX_SKEW_S = 300.0
"""How much a sender's clock may be ahead. An event of the future would hold against all later ones."""

_NO_RUN = ""
_NEARLY_FULL = 0.8  # share of the price that a sender may keep

log = logging.getLogger("noria.registry")


class LineageStore:
    """The lineage of a database opened by `schema.open_registry`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def record(self, events: Sequence[Event], sender: str, now: float, *, max_sender_bytes: float | None = None) -> int:
        """Record all events or none; returns how many are new.

        Raises:
            BodyTooLarge: the events would write more than `MAX_ROWS` rows.
            ForeignRun: a run belongs to another sender, or the sender's events of it are struck out.
            InvalidField: an event is of the future.
            RegistryError: a run would have more than its limits, or the sender more than `max_sender_bytes`.
        """
        if (count := sum(map(num_rows_of, events))) > MAX_ROWS:
            raise BodyTooLarge(
                f"{len(events)} events would write {count} rows of the registry; {MAX_ROWS} at once are allowed. Send "
                "fewer events at once, or divide an event."
            )
        with write_transaction(self._engine, yields=True) as connection:
            return record_events(connection, events, sender, now, max_sender_bytes=max_sender_bytes)

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()


class _RunRow(NamedTuple):
    """The row of a run, which this transaction holds."""

    run_id: str
    state: RunState | None  # None: none of its events counts
    owner: str
    num_events: int
    num_bytes: int


def record_events(
    connection: Connection,
    events: Sequence[Event],
    sender: str,
    now: float,
    *,
    max_sender_bytes: float | None = None,
    is_operator: bool = False,
) -> int:
    """Record as `LineageStore.record`, in the caller's transaction. An operator's may be of any run, whatever it has.

    Events that were read from another server, which only operators' commands do, take their run over. Datasets, runs
    and senders are locked in one order everywhere: no deadlock.
    """
    _check_times(events, now)
    sent = {event.digest: event if event.sender else event._replace(sender=sender) for event in events}
    ordered = sorted(sent.values(), key=lambda event: (*_run_and_sender(event), event.digest))
    is_read = {event.sender for event in events}
    refs = refs_of(event.statement for event in ordered if event.statement is not None)
    version_ids = dataset_version_ids(connection, refs)
    known = _lock_runs(connection, ordered)
    inserted = _insert_events(connection, ordered, now)
    changes: list[RunChange] = []
    prices: Counter[str] = Counter()
    freed: Counter[str] = Counter()
    for (run_id, of_sender), group in itertools.groupby(ordered, _run_and_sender):
        of_run = list(group)
        new = [event for event in of_run if event.digest in inserted]
        prices[of_sender] += sum(map(price_of, new))
        if not run_id:
            continue
        if of_sender in is_read:  # also if the run's owner has sent the same before
            known[run_id], no_longer = _taken_over(connection, known[run_id], of_run, now, sender)
            freed += no_longer
        if new:
            run = known[run_id]
            if of_sender not in is_read:
                run = _claimed(connection, run, of_sender, is_operator=is_operator)
            known[run_id], change = _with(run, new)
            changes.append(change)
    write_runs(connection, changes, version_ids)
    if not is_operator:
        _check_sizes(connection, [known[change.run_id] for change in changes])
    for each in sorted({*prices, *freed}):
        if freed[each]:
            free(connection, each, freed[each])
        if prices[each]:
            _add_to_sender(connection, each, prices[each], max_sender_bytes)
    return len(inserted)


def _check_times(events: Sequence[Event], now: float) -> None:
    for event in events:
        if event.at > now + MAX_SKEW_S:
            field = f"{event.where}eventTime"
            raise InvalidField(
                f"{field} is {_iso(event.at)}, which is in the future; it is {_iso(now)}. Set the clock of the sender.",
                field=field,
            )


def _run_and_sender(event: Event) -> tuple[str, str]:
    assert event.sender is not None
    return event.run_id or _NO_RUN, event.sender


def _lock_runs(connection: Connection, events: Sequence[Event]) -> dict[str, _RunRow]:
    """Return the runs of events, whose rows are this transaction's now. A new one is its first sender's."""
    owners: dict[str, str] = {}
    for event in events:
        if event.run_id is not None and event.sender is not None:
            owners.setdefault(event.run_id, event.sender)
    blank = {"job_namespace": "", "job_name": "", "status": "unknown", "state": "", "num_events": 0, "num_bytes": 0}
    blanks = [{"run_id": run_id, "owner": owner, **blank} for run_id, owner in owners.items()]
    new = insert_new(connection, runs, runs.c.run_id, blanks)
    known = {run_id: _RunRow(run_id, None, owners[run_id], 0, 0) for run_id in new}
    columns = (runs.c.run_id, runs.c.state, runs.c.owner, runs.c.num_events, runs.c.num_bytes)
    for chunk in chunks([run_id for run_id in owners if run_id not in new]):
        query = sa.select(*columns).where(runs.c.run_id.in_(chunk)).order_by(runs.c.run_id).with_for_update()
        for row in connection.execute(query):
            known[row.run_id] = _RunRow(row.run_id, read_state(row.state), row.owner, row.num_events, row.num_bytes)
    return known


def _insert_events(connection: Connection, events: Sequence[Event], now: float) -> set[str]:
    """Insert events; returns the digests of those that are new."""
    rows = [
        {
            "digest": event.digest,
            "run_id": event.run_id,
            "at": event.at,
            "received_at": now,
            "received_from": event.sender,
            "body": event.body,
        }
        for event in events
    ]
    return insert_new(connection, lineage_events, lineage_events.c.digest, rows)


def _taken_over(
    connection: Connection, run: _RunRow, events: Sequence[Event], now: float, operator: str
) -> tuple[_RunRow, Counter[str]]:
    """Return the run as that of the server that its events were read from, and what that frees of others' prices."""
    _, server = _run_and_sender(events[0])
    if run.owner in ("", server):
        return run._replace(owner=server), Counter()
    state, freed = take_over(connection, run.run_id, run.owner, events, Change(now, operator, f"{server} has the run"))
    return run._replace(state=read_state(state), owner=server), freed


def _with(run: _RunRow, new: Sequence[Event]) -> tuple[_RunRow, RunChange]:
    """Return a run with new events, and what they change of it."""
    added = fold(new)
    state = added if run.state is None else fold(new, run.state)
    num_bytes = run.num_bytes + sum(len(event.body.encode()) for event in new)
    run = run._replace(state=state, num_events=run.num_events + len(new), num_bytes=num_bytes)
    counts = {"num_events": run.num_events, "num_bytes": run.num_bytes, "owner": run.owner}
    return run, RunChange(run.run_id, state, added, counts)


def _claimed(connection: Connection, run: _RunRow, sender: str, *, is_operator: bool) -> _RunRow:
    """Return the run as its sender's; an operator may add to any. Raises ForeignRun: it is not, and becomes not so."""
    if is_operator:
        return run if run.state is not None else run._replace(owner=run.owner or sender)
    if run.owner not in ("", sender):
        raise ForeignRun(
            f"the run {run.run_id} belongs to {run.owner!r}, who sent its first event; {sender!r} may not send events "
            "of it. Give the run an id of its own, or send its events with a key of the same name: a key that is "
            "replaced keeps its runs under its name."
        )
    if not run.owner and is_closed_to(connection, run.run_id, sender):
        raise ForeignRun(
            f"an operator has struck out what {sender!r} sent of the run {run.run_id}, which takes no more from this "
            "sender. Give the run an id of its own."
        )
    return run._replace(owner=sender)


def _check_sizes(connection: Connection, changed: Sequence[_RunRow]) -> None:
    """Raise RegistryError if a run has more than its limits."""
    rows = num_rows(connection, [run.run_id for run in changed])
    for run in changed:
        for count, maximum, unit in (
            (run.num_events, MAX_EVENTS, "events"),
            (run.num_bytes, MAX_BYTES, "bytes of events"),
            (rows[run.run_id], MAX_ENTRIES, "parameters, metrics, inputs and outputs"),
        ):
            if count > maximum:
                raise RegistryError(
                    f"the run {run.run_id} would have {count} {unit}; {maximum} are allowed. Send the rest as a step, "
                    "a run of its own whose facet parent names this one."
                )


def _add_to_sender(connection: Connection, sender: str, price: int, maximum: float | None) -> None:
    """Count the bytes that a sender's events take. Raises RegistryError: they are more than the maximum."""
    insert = dialect_insert(connection, lineage_senders).values(sender=sender, num_bytes=price)
    total = lineage_senders.c.num_bytes + price
    upsert = insert.on_conflict_do_update(index_elements=["sender"], set_={"num_bytes": total})
    now_has: int = connection.execute(upsert.returning(lineage_senders.c.num_bytes)).scalar_one()
    if maximum is None:
        return
    if now_has > maximum:
        raise RegistryError(
            f"the lineage of {sender!r} would take {now_has} bytes of the registry, rows included; {maximum:.0f} are "
            "allowed. The server's operator can strike out what is wrong, or raise registry.max_lineage_mib."
        )
    if now_has - price <= _NEARLY_FULL * maximum < now_has:
        log.warning(
            "the lineage of %r takes %.0f %% of registry.max_lineage_mib; beyond it the sender's events are 409",
            sender,
            100 * now_has / maximum,
            extra=fields(event="lineage_nearly_full", sender=sender),
        )


def _iso(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")
