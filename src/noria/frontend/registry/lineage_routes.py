"""`/api/v1/lineage`: OpenLineage's events over HTTP, as its clients send them."""

import functools

from starlette.requests import Request
from starlette.responses import Response

from noria.frontend.http.body import JsonBodyReader
from noria.frontend.http.operations import JsonObject, Operation, Served
from noria.frontend.registry.lineage import LineageService
from noria.registry.lineage.openlineage import LineageEventBody

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
