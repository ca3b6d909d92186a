"""OpenLineage's events, and what they say of a run: the same in any order, however often each arrives. Pure.

An event is kept whole; `RunState` is what the registry itself uses of it. In a state each entry remembers the time and
the digest of the event that stated it, and the latest statement holds. `merge` is therefore commutative, associative
and idempotent, and a state is the `merge` of what each event says, one at a time.

Facets that are no part of the specification or of the wrong type state nothing. Noria's own is the run facet
`noria_metrics`: `{"metrics": {NAME: NUMBER}}`. A version `sha256:…` of a dataset is the digest of its content.
"""

import functools
import hashlib
import itertools
import re
import sys
import uuid
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta, Struct

from noria.errors import InvalidBody, InvalidField, short_repr

EventType = Literal["START", "RUNNING", "COMPLETE", "ABORT", "FAIL", "OTHER"]
Status = Literal["running", "complete", "aborted", "failed", "unknown"]

SHA256 = re.compile(r"sha256:[0-9a-f]{64}")
_STATUSES: Mapping[str, Status] = {"COMPLETE": "complete", "ABORT": "aborted", "FAIL": "failed"}
MAX_VERSION_CHARS = 2000
_MAX_URI_CHARS = 2000
_MAX_DATASETS = 1000  # datasets of an event, inputs and outputs each
_MAPS = ("params", "metrics", "inputs", "outputs")  # fields of `RunState`
_MAX_TIME = 253_370_764_800.0  # the end of the year 9998: it has a date in every zone

_Namespace = Annotated[str, Meta(min_length=1, max_length=500, pattern="^[^\\u0000]*$")]
_Name = Annotated[str, Meta(min_length=1, max_length=2000, pattern="^[^\\u0000]*$")]


class LineageDataset(Struct, frozen=True):
    """A dataset in an event."""

    namespace: _Namespace
    name: _Name
    facets: dict[str, Any] | None = None


class LineageJob(Struct, frozen=True):
    """A job in an event."""

    namespace: _Namespace
    name: _Name


class LineageRun(Struct, frozen=True):
    """A run in an event."""

    runId: uuid.UUID
    facets: dict[str, Any] | None = None


class LineageEventBody(Struct, frozen=True):
    """A RunEvent; DatasetEvents and JobEvents have no `run`. What else an event has is kept."""

    eventTime: datetime
    eventType: EventType | None = None
    run: LineageRun | None = None
    job: LineageJob | None = None
    dataset: LineageDataset | None = None
    inputs: Annotated[list[LineageDataset], Meta(max_length=_MAX_DATASETS)] | None = None
    outputs: Annotated[list[LineageDataset], Meta(max_length=_MAX_DATASETS)] | None = None


class Statement(Struct, frozen=True, array_like=True):
    """A value, and the event that stated it."""

    at: float
    digest: str
    value: Any


class RunState(Struct, frozen=True, omit_defaults=True):
    """The state of one run, by its events. Datasets are JSON lists of namespace, name and version, "" if unstated."""

    first_at: float  # the time of the first event
    started: Statement | None = None  # the first START, without a value
    ended: Statement | None = None  # its event type
    is_running: bool = False  # a START or RUNNING has come
    job: Statement | None = None  # namespace and name
    parent: Statement | None = None  # a run id
    error: Statement | None = None  # a message
    params: dict[str, Statement] = {}
    metrics: dict[str, Statement] = {}
    inputs: dict[str, Statement] = {}  # a URI or None
    outputs: dict[str, Statement] = {}

    @property
    def status(self) -> Status:
        """How far the run is. An end holds, whatever else comes later."""
        if self.ended is not None:
            return _STATUSES[self.ended.value]
        return "running" if self.is_running else "unknown"


class Event(NamedTuple):
    """An event, whole and as a statement."""

    digest: str
    at: float  # Unix time in seconds, as the event says
    run_id: str | None  # None: a DatasetEvent or JobEvent
    body: str  # JSON with sorted keys
    statement: RunState | None  # the statement of a run's event
    where: str = ""  # before the names of its fields in messages
    sender: str | None = None  # the server that it was read from; None: who passes it on


class DatasetRef(NamedTuple):
    """A version of a dataset."""

    namespace: str
    name: str
    version: str  # empty: not stated

    @property
    def digest(self) -> str | None:
        """The digest that the version is, if it is one."""
        return self.version if SHA256.fullmatch(self.version) else None


def parse_event(raw: bytes, where: str = "") -> Event:
    """Parse one event. `where` is put before field names in messages, as in "[3].".

    Raises:
        InvalidBody: not JSON, or not an object.
        InvalidField: a field that lineage needs is missing, of the wrong type, or too long.
    """
    try:
        body = msgspec.json.decode(raw, type=LineageEventBody)
        # By digest, an event that is sent again with other white space is the same.
        canonical = msgspec.json.encode(msgspec.json.decode(raw), order="sorted")
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `$")
        field = where + path.strip("`").lstrip(".")
        raise InvalidField(f"{field or 'the event'}: {problem}.", field=field or None) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidBody(f"{where or 'the event '}is not JSON: {error}.") from error
    at = min(max(0.0, _utc(body.eventTime).timestamp()), _MAX_TIME)
    digest = f"sha256:{hashlib.sha256(canonical).hexdigest()}"
    if body.run is None:
        if body.job is None and body.dataset is None:
            raise InvalidField(
                f"{where}run is missing, and so are job and dataset; one is needed.", field=f"{where}run"
            )
        return Event(digest, at, None, canonical.decode(), None, where)
    if body.job is None:
        raise InvalidField(f"{where}job is missing.", field=f"{where}job")
    return Event(digest, at, str(body.run.runId), canonical.decode(), _statement(body, at, digest, where), where)


def merge(one: RunState, other: RunState) -> RunState:
    """Return the state that follows from the events of both."""
    starts = [state.started for state in (one, other) if state.started is not None]
    return RunState(
        first_at=min(one.first_at, other.first_at),
        started=min(starts, key=_stamp, default=None),
        ended=_latest(one.ended, other.ended),
        is_running=one.is_running or other.is_running,
        job=_latest(one.job, other.job),
        parent=_latest(one.parent, other.parent),
        error=_latest(one.error, other.error),
        **{name: _merge_entries([getattr(one, name), getattr(other, name)]) for name in _MAPS},
    )


def fold(events: Iterable[Event], state: RunState | None = None) -> RunState:
    """Return the state that follows from events of one run, at least one, and from its state before them."""
    states = [event.statement for event in events if event.statement is not None]
    states = states if state is None else [state, *states]
    # Entry by entry: as many merges would copy all entries as many times.
    heads = (msgspec.structs.replace(each, **{name: {} for name in _MAPS}) for each in states)
    maps = {name: _merge_entries(getattr(each, name) for each in states) for name in _MAPS}
    return msgspec.structs.replace(functools.reduce(merge, heads), **maps)


def dataset_statements(entries: Mapping[str, Statement]) -> dict[DatasetRef, Statement]:
    """Return the datasets of `RunState.inputs` or `outputs`.

    One whose version an event leaves out, and another states, is that version.
    """
    found = {DatasetRef(*msgspec.json.decode(key)): entry for key, entry in sorted(entries.items())}
    stated = {(ref.namespace, ref.name) for ref in found if ref.version}
    return {ref: entry for ref, entry in found.items() if ref.version or (ref.namespace, ref.name) not in stated}


def _statement(body: LineageEventBody, at: float, digest: str, where: str) -> RunState:
    """Return what one event says of its run."""
    assert body.run is not None and body.job is not None

    def stated(value: Any) -> Statement:
        return Statement(at, digest, value)

    facets = body.run.facets or {}
    parent, error = _parent(facets, body.run.runId), _object(facets, "errorMessage").get("message")
    metrics = _object(facets, "noria_metrics").get("metrics")
    return RunState(
        first_at=at,
        started=stated(None) if body.eventType == "START" else None,
        ended=stated(body.eventType) if body.eventType in _STATUSES else None,
        is_running=body.eventType in ("START", "RUNNING"),
        job=stated([body.job.namespace, body.job.name]),
        parent=None if parent is None else stated(parent),
        error=stated(error) if isinstance(error, str) else None,
        params={name: stated(value) for name, value in _params(facets)},
        metrics={
            name: stated(value)
            for name, value in (metrics.items() if isinstance(metrics, dict) else ())
            if _is_number(value)
        },
        inputs={key: stated(uri) for key, uri in _io(body.inputs, f"{where}inputs")},
        outputs={key: stated(uri) for key, uri in _io(body.outputs, f"{where}outputs")},
    )


def _is_number(value: Any) -> bool:
    """Whether a value of JSON is a number that a float can hold."""
    return type(value) is float or (type(value) is int and abs(value) <= sys.float_info.max)


def _io(entries: list[LineageDataset] | None, where: str) -> list[tuple[str, str | None]]:
    found = []
    for number, dataset in enumerate(entries or ()):
        facets = dataset.facets or {}
        version, uri = _object(facets, "version").get("datasetVersion"), _object(facets, "dataSource").get("uri")
        ref = DatasetRef(dataset.namespace, dataset.name, version if isinstance(version, str) else "")
        if len(ref.version) > MAX_VERSION_CHARS or "\0" in ref.version:
            field = f"{where}[{number}].facets.version.datasetVersion"
            raise InvalidField(
                f"{field} is {short_repr(ref.version)}; allowed are {MAX_VERSION_CHARS} characters, and no NUL.",
                field=field,
            )
        has_uri = isinstance(uri, str) and len(uri) <= _MAX_URI_CHARS and "\0" not in uri
        found.append((msgspec.json.encode(ref).decode(), uri if has_uri else None))
    return found


def _parent(facets: dict[str, Any], run_id: uuid.UUID) -> str | None:
    """Return the run that this one is a step of. A run is no step of itself."""
    try:
        parent = uuid.UUID(_object(_object(facets, "parent"), "run").get("runId"))
    except (AttributeError, TypeError, ValueError):
        return None
    return None if parent == run_id else str(parent)


def _params(facets: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the names and values of OpenLineage's ExecutionParametersRunFacet."""
    listed = _object(facets, "executionParameters").get("parameters")
    found = []
    for each in listed if isinstance(listed, list) else ():
        name = (each.get("key") or each.get("name")) if isinstance(each, dict) else None
        if isinstance(name, str):
            found.append((name, each.get("value")))
    return found


def _object(facets: Mapping[str, Any], name: str) -> dict[str, Any]:
    found = facets.get(name)
    return found if isinstance(found, dict) else {}


def _utc(time: datetime) -> datetime:
    """Return a time with its zone; one without is UTC."""
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)


def _stamp(statement: Statement) -> tuple[float, str]:
    return statement.at, statement.digest


def _latest(one: Statement | None, other: Statement | None) -> Statement | None:
    return max((each for each in (one, other) if each is not None), key=_stamp, default=None)


def _merge_entries(maps: Iterable[Mapping[str, Statement]]) -> dict[str, Statement]:
    """Return the latest statement of each entry; of a URI, the latest that is stated at all."""
    merged: dict[str, Statement] = {}
    for key, statement in itertools.chain.from_iterable(each.items() for each in maps):
        known = merged.get(key)
        if known is None or (statement.value is not None, _stamp(statement)) > (known.value is not None, _stamp(known)):
            merged[key] = statement
    return merged
