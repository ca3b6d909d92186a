"""OpenLineage in the OpenAPI document: the part of its events that the registry uses, and its paths."""

from typing import Any

from noria.frontend.http.paths import LINEAGE_PATH
from noria.frontend.openapi.operations import operation
from noria.registry.lineage.openlineage import LineageEventBody

DESCRIPTIONS = {
    "eventTime": "when it happened; without a zone it is UTC",
    "eventType": "`START`, `RUNNING`, an end (`COMPLETE`, `ABORT`, `FAIL`) or `OTHER`",
    "run": "its `runId`, and facets such as `parent`, `executionParameters`, `errorMessage`, `noria_metrics`",
    "job": "what runs",
    "dataset": "of a DatasetEvent, which is about no run",
    "inputs": "datasets that the run reads; the facet `version` says which version",
    "outputs": "datasets that the run writes; a model is one, with the digest of its manifest as version",
}

EXAMPLE = {
    "eventType": "COMPLETE",
    "eventTime": "2026-11-22T09:00:00Z",
    "producer": "https://example.com/train",
    "schemaURL": "https://openlineage.io/spec/2-0-2/OpenLineage.json#/$defs/RunEvent",
    "run": {"runId": "01a2028d-9625-77a9-a141-efbbcc3a6ef9"},
    "job": {"namespace": "demo", "name": "train"},
    "inputs": [{"namespace": "file", "name": "/scenes", "facets": {"version": {"datasetVersion": "7"}}}],
    "outputs": [],
}


def add_to_schemas(schemas: dict[str, Any]) -> None:
    """Add what the event's types do not say: the form of times, and which events there are."""
    schema = schemas[LineageEventBody.__name__]
    schema["properties"]["eventTime"]["format"] = "date-time"
    schema["anyOf"] = [
        {"required": ["job"], "properties": {"job": {"type": "object"}}},
        {"required": ["dataset"], "properties": {"dataset": {"type": "object"}, "run": {"type": "null"}}},
    ]


def paths() -> dict[str, Any]:
    """Return the operations by path."""
    one = operation(
        "Send an event of OpenLineage",
        "The registry records it. An event that was received before is accepted and changes nothing, so clients may "
        "repeat it. The whole event is kept, also what is not listed here.",
        body=LineageEventBody,
        content={},
    )
    batch = operation(
        "Send a list of events",
        "All are recorded, or none if one is not valid; the error says which.",
        body=LineageEventBody,
        content={},
    )
    batch["requestBody"]["content"]["application/json"]["schema"] = {
        "type": "array",
        "items": {"$ref": f"#/components/schemas/{LineageEventBody.__name__}"},
    }
    batch["responses"]["204"] = batch["responses"].pop("200") | {"description": "recorded"}
    return {LINEAGE_PATH: {"post": one}, f"{LINEAGE_PATH}/batch": {"post": batch}}
