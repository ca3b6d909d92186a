"""`/api/v1/lineage`: OpenLineage's events over HTTP, as its clients send them."""

import functools
import time
from collections.abc import Callable, Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from noria.config.registry import RegistryConfig
from noria.errors import InvalidBody, RateLimited
from noria.frontend.access.quotas import TokenBucket
from noria.frontend.http.body import JsonBodyReader
from noria.frontend.http.operations import JsonObject, Operation, Served
from noria.frontend.registry.connection import RegistryConnection
from noria.registry.lineage.openlineage import Event, LineageEventBody, parse_event
from noria.registry.lineage.store import LineageStore

_MIB = 2**20


class LineageService:
    """Records events. Each front end grants its share of the limits of a sender, an API key or an address."""

    def __init__(
        self, registry: RegistryConnection, config: RegistryConfig, num_processes: Callable[[], int] = lambda: 1
    ) -> None:
        self._registry, self._config, self._num_processes = registry, config, num_processes
        self._limits: dict[str, tuple[TokenBucket, TokenBucket]] = {}  # by sender: of events, of bytes

    async def record(self, body: bytes, sender: str) -> None:
        """Record one event.

        Raises:
            BodyTooLarge, ForeignRun, RegistryConflict: see `LineageStore.record`, whose RegistryError is the last.
            InvalidBody, InvalidField: see `parse_event`.
            RateLimited: the sender has sent too much in the last minute.
            RegistryUnavailable: the database does not answer, or cannot be opened.
        """
        await self._record(body, lambda: [parse_event(body)], sender)

    async def record_batch(self, body: bytes, sender: str) -> None:
        """Record a JSON list of events, if all are valid. Raises what `record` raises."""
        await self._record(body, lambda: _parse_batch(body), sender)

    async def _record(self, body: bytes, parse: Callable[[], Sequence[Event]], sender: str) -> None:
        """Parse, which takes long for large events, and record in threads."""
        events_limit, bytes_limit = self._limits_of(sender)
        _charge(bytes_limit, len(body), "bytes of lineage", sender)
        events = await self._registry.run_lineage(sender, lambda _: parse())
        _charge(events_limit, len(events), "lineage events", sender)
        now = self._registry.clock()
        maximum = self._config.max_lineage_mib * _MIB
        await self._registry.run_lineage(
            sender, lambda engine: LineageStore(engine).record(events, sender, now, max_sender_bytes=maximum)
        )

    def _limits_of(self, sender: str) -> tuple[TokenBucket, TokenBucket]:
        share = 1 / self._num_processes()
        per_minute = (
            self._config.lineage_events_per_minute * share,
            self._config.lineage_mib_per_minute * _MIB * share,
        )
        limits = self._limits.get(sender)
        if limits is None:
            limits = self._limits[sender] = TokenBucket(per_minute[0]), TokenBucket(per_minute[1])
        for bucket, limit in zip(limits, per_minute, strict=True):
            bucket.update(limit)
        return limits


def _charge(bucket: TokenBucket, count: int, unit: str, sender: str) -> None:
    """Charge what a sender sends; what is more than a minute has takes all of a minute. Raises RateLimited."""
    if wait_s := bucket.take(min(count, int(bucket.capacity)), time.monotonic()):
        raise RateLimited(
            f"{sender!r} may send {bucket.capacity:.0f} {unit} a minute to this front end, and has; {count} more pass "
            "after Retry-After. The server's operator can raise registry.lineage_events_per_minute and "
            "registry.lineage_mib_per_minute.",
            retry_after_s=wait_s,
        )


def _parse_batch(body: bytes) -> list[Event]:
    try:
        raw_events = msgspec.json.decode(body, type=list[msgspec.Raw])
    except msgspec.ValidationError as error:
        raise InvalidBody(f"the body is not a list of events: {error}.") from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidBody(f"the body is not JSON: {error}.") from error
    return [parse_event(bytes(raw), f"[{number}].") for number, raw in enumerate(raw_events)]


_FIELDS = {
    "eventTime": "when it happened; without a zone it is UTC",
    "eventType": "`START`, `RUNNING`, an end (`COMPLETE`, `ABORT`, `FAIL`) or `OTHER`",
    "run": "its `runId`, and facets such as `parent`, `executionParameters`, `errorMessage`, `noria_metrics`",
    "job": "what runs",
    "dataset": "of a DatasetEvent, which is about no run",
    "inputs": "datasets that the run reads; the facet `version` says which version",
    "outputs": "datasets that the run writes; a model is one, with the digest of its manifest as version",
}

_EXAMPLE = {
    "eventType": "COMPLETE",
    "eventTime": "2026-11-22T09:00:00Z",
    "producer": "https://example.com/train",
    "schemaURL": "https://openlineage.io/spec/2-0-2/OpenLineage.json#/$defs/RunEvent",
    "run": {"runId": "01a2028d-9625-77a9-a141-efbbcc3a6ef9"},
    "job": {"namespace": "demo", "name": "train"},
    "inputs": [{"namespace": "file", "name": "/scenes", "facets": {"version": {"datasetVersion": "7"}}}],
    "outputs": [],
}


def _describe_event(schemas: dict[str, JsonObject], _: Served) -> None:
    """Add what the event's types do not say: the form of times, and which events there are."""
    schema = schemas[LineageEventBody.__name__]
    schema["properties"]["eventTime"]["format"] = "date-time"
    schema["anyOf"] = [
        {"required": ["job"], "properties": {"job": {"type": "object"}}},
        {"required": ["dataset"], "properties": {"dataset": {"type": "object"}, "run": {"type": "null"}}},
    ]


class LineageRoutes:
    """The routes of OpenLineage. An event that was received before is accepted again and changes nothing."""

    def __init__(self, service: LineageService, body_reader: JsonBodyReader) -> None:
        self._service, self._body_reader = service, body_reader

    @property
    def operations(self) -> list[Operation]:
        """The operations to serve; OpenLineage's clients post to these paths."""
        post = functools.partial(
            Operation, method="POST", group="Lineage", scopes=("lineage",), fields=_FIELDS, example=_EXAMPLE
        )
        return [
            post(
                path="/api/v1/lineage",
                handler=self._event,
                summary="Send an event of OpenLineage",
                description="An event that was received before is accepted and changes nothing. The whole event is "
                "kept, also what is not listed here.",
                body=LineageEventBody,
                describe=_describe_event,
            ),
            post(
                path="/api/v1/lineage/batch",
                handler=self._batch,
                summary="Send a list of events",
                description="All are recorded, or none if one is not valid; the error says which.",
                body=list[LineageEventBody],
                status=204,
            ),
        ]

    async def _event(self, http: Request) -> Response:
        await self._service.record(await self._read(http), _lineage_sender(http))
        return Response()

    async def _batch(self, http: Request) -> Response:
        await self._service.record_batch(await self._read(http), _lineage_sender(http))
        return Response(status_code=204)

    async def _read(self, http: Request) -> bytes:
        return await self._body_reader.read(http, takes_gzip=True)


_LOCAL_SENDER = "127.0.0.1"
"""Without API keys all clients of this machine are one: a script may reach the server by several addresses."""


def _lineage_sender(http: Request) -> str:
    name: str | None = http.state.api_client.name
    return name or _LOCAL_SENDER


def sender_of(http: Request) -> str:
    """Return the name of the request's API key, or its address."""
    name: str | None = http.state.api_client.name
    return name or (http.client.host if http.client else "")
