"""Strikes out lineage events, so that they count no more, and lists events. Events are never deleted. Calls block."""

import uuid
from collections import Counter
from collections.abc import Sequence

import msgspec
import sqlalchemy as sa
from msgspec import Struct
from sqlalchemy import Connection, Engine

from noria.errors import RegistryError, short_repr
from noria.registry.changes import Change
from noria.registry.lineage.openlineage import SHA256, Event, fold, parse_event
from noria.registry.lineage.run_rows import body_bytes, price_of, rewrite_run
from noria.registry.schema import lineage_events, lineage_senders, runs, struck_events
from noria.storage.database import write_transaction
from noria.storage.field_copies import copy_fields


class LineageEventRow(Struct, frozen=True):
    """An event, without its body."""

    seq: int
    digest: str
    run_id: str | None
    at: float  # as the event says
    received_at: float
    sender: str
    num_bytes: int
    struck_out: Change | None


class LineageEventList(Struct, frozen=True):
    """Events, the newest first."""

    data: list[LineageEventRow]
    next: int | None  # the `before` of the next page


class StruckEvents(Struct, frozen=True):
    """The events that were struck out."""

    digests: list[str]  # digests of the events that counted until then


def strike_out(engine: Engine, what: str, change: Change) -> StruckEvents:
    """Strike out all events of a run, by its id, or one event, by its digest. What follows from them is taken back.

    An event that is sent again stays struck out.

    Raises RegistryError: there is no such run or event.
    """
    is_wanted = _is_wanted(what)
    with write_transaction(engine) as connection:
        found = connection.execute(sa.select(lineage_events.c.run_id).where(is_wanted).limit(1)).first()
        if found is None:
            raise RegistryError(f"the registry has no lineage events of {short_repr(what)}.")
        owner = None
        if found.run_id is not None:  # its row is this transaction's from now on
            query = sa.select(runs.c.owner).where(runs.c.run_id == found.run_id).with_for_update()
            owner = connection.execute(query).scalar_one()
        digests, freed = _strike(connection, is_wanted, change)
        for sender, price in sorted(freed.items()):
            free(connection, sender, price)
        if digests and owner is not None:
            _fold_again(connection, found.run_id, owner)
    return StruckEvents(digests)


def take_over(
    connection: Connection, run_id: str, owner: str, read: Sequence[Event], change: Change
) -> tuple[str, Counter[str]]:
    """Give a run, whose row is the caller's, to the server that its events were `read` from, which are recorded.

    Other events of the run's `owner` are struck out. Returns the new state of the run, as `runs.state` has it, and what
    is to be passed to `free`.
    """
    digests = [event.digest for event in read]
    of_owner = sa.and_(lineage_events.c.run_id == run_id, lineage_events.c.received_from == owner)
    _, freed = _strike(connection, of_owner & lineage_events.c.digest.not_in(digests), change)
    assert read[0].sender is not None
    _fold_again(connection, run_id, read[0].sender, frozenset(digests))
    state: str = connection.execute(sa.select(runs.c.state).where(runs.c.run_id == run_id)).scalar_one()
    return state, freed


def free(connection: Connection, sender: str, price: int) -> None:
    """Let a sender send as much again as events of this price, which count no more."""
    num_bytes = lineage_senders.c.num_bytes
    remaining = sa.case((num_bytes > price, num_bytes - price), else_=0)  # earlier releases charged less
    connection.execute(lineage_senders.update().where(lineage_senders.c.sender == sender).values(num_bytes=remaining))


def is_closed_to(connection: Connection, run_id: str, sender: str) -> bool:
    """Return whether events of this sender and run are struck out."""
    of_sender = sa.and_(lineage_events.c.run_id == run_id, lineage_events.c.received_from == sender)
    return (
        connection.execute(sa.select(lineage_events.c.seq).where(of_sender, ~is_counting()).limit(1)).first()
        is not None
    )


def list_events(connection: Connection, run_id: str | None, before: int | None, limit: int) -> LineageEventList:
    """Return a page of the events of a run, or of all. Raises RegistryError: `run_id` is no id of a run."""
    query = (
        sa.select(lineage_events, body_bytes(connection).label("num_bytes"))
        .add_columns(struck_events.c.at.label("struck_at"), struck_events.c.by, struck_events.c.why)
        .outerjoin(struck_events, struck_events.c.event_seq == lineage_events.c.seq)
        .order_by(lineage_events.c.seq.desc())
        .limit(limit + 1)
    )
    if run_id is not None:
        query = query.where(lineage_events.c.run_id == _uuid(run_id))
    if before is not None:
        query = query.where(lineage_events.c.seq < before)
    rows = connection.execute(query).all()
    data = [
        copy_fields(
            LineageEventRow,
            row,
            sender=row.received_from,
            struck_out=None if row.struck_at is None else Change(row.struck_at, row.by, row.why),
        )
        for row in rows[:limit]
    ]
    return LineageEventList(data, data[-1].seq if len(rows) > limit else None)


def is_counting() -> sa.ColumnElement[bool]:
    """Return whether an event is not struck out, as SQL."""
    return sa.not_(sa.exists().where(struck_events.c.event_seq == lineage_events.c.seq))


def _strike(
    connection: Connection, is_wanted: sa.ColumnElement[bool], change: Change
) -> tuple[list[str], Counter[str]]:
    """Strike out those events that count; returns their digests, and their prices by sender."""
    columns = (lineage_events.c.seq, lineage_events.c.digest, lineage_events.c.received_from, lineage_events.c.body)
    found = connection.execute(sa.select(*columns).where(is_wanted, is_counting()).order_by(lineage_events.c.seq)).all()
    freed: Counter[str] = Counter()
    for row in found:
        freed[row.received_from] += price_of(parse_event(row.body.encode()))
    if found:
        values = msgspec.structs.asdict(change)
        connection.execute(struck_events.insert(), [{"event_seq": row.seq, **values} for row in found])
    return [row.digest for row in found], freed


def _fold_again(connection: Connection, run_id: str, owner: str, read: frozenset[str] = frozenset()) -> None:
    """Write the rows of a run by its events that count. It is its owner's as long as one of the owner's is among them.

    Those whose digests are in `read` count as the owner's, whoever sent them first. The others are operators', who own
    no run of another.
    """
    columns = (lineage_events.c.body, lineage_events.c.received_from, lineage_events.c.digest)
    query = sa.select(*columns).order_by(lineage_events.c.seq)
    rows = connection.execute(query.where(lineage_events.c.run_id == run_id, is_counting())).all()
    state = fold(parse_event(row.body.encode()) for row in rows) if rows else None
    is_owned = any(row.received_from == owner or row.digest in read for row in rows)
    rewrite_run(connection, run_id, state, owner if is_owned else "")


def _is_wanted(what: str) -> sa.ColumnElement[bool]:
    if SHA256.fullmatch(what):
        return lineage_events.c.digest == what
    return lineage_events.c.run_id == _uuid(what)


def _uuid(text: str) -> str:
    try:
        return str(uuid.UUID(text))
    except ValueError:
        raise RegistryError(
            f"{short_repr(text)} is neither the id of a run nor the digest of an event, sha256: and 64 digits."
        ) from None
