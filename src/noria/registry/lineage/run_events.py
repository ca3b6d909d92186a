"""Makes OpenLineage events, as JSON objects. Pure. `openlineage.py` reads them."""

import pathlib
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from noria.errors import RegistryError, short_repr
from noria.registry.lineage.openlineage import DatasetRef, EventType

PRODUCER = "https://pypi.org/project/noria-serve"
MODELS_NAMESPACE = "noria"
_SPEC = "https://openlineage.io/spec"
_EVENT_SCHEMA = f"{_SPEC}/2-0-2/OpenLineage.json#/$defs"
_SCHEMAS = {  # schemas of OpenLineage's facets; Noria's own have that of any facet
    "version": "1-0-1/DatasetVersionDatasetFacet",
    "datasetType": "1-0-1/DatasetTypeDatasetFacet",
    "dataSource": "1-0-1/DatasourceDatasetFacet",
    "parent": "1-2-0/ParentRunFacet",
    "errorMessage": "1-0-1/ErrorMessageRunFacet",
    "executionParameters": "1-0-0/ExecutionParametersRunFacet",
}


class RunId(NamedTuple):
    """A run and its job."""

    run_id: str
    job_namespace: str
    job_name: str


def run_event(
    event_type: EventType,
    at: float,
    run: RunId,
    *,
    parent: RunId | None = None,
    inputs: Mapping[DatasetRef, str | None] | None = None,
    outputs: Mapping[DatasetRef, str | None] | None = None,
    params: Mapping[str, Any] | None = None,
    metrics: Mapping[str, float] | None = None,
    error: str | None = None,
) -> dict[str, Any]:
    """Return an event of `run` at the Unix time `at`; inputs and outputs with their URIs."""
    facets: dict[str, dict[str, Any]] = {}
    if parent is not None:
        job = {"namespace": parent.job_namespace, "name": parent.job_name}
        facets["parent"] = {"run": {"runId": parent.run_id}, "job": job}
    if params:
        facets["executionParameters"] = {
            "parameters": [{"key": name, "name": name, "value": _text(value)} for name, value in params.items()]
        }
    if metrics:
        facets["noria_metrics"] = {"metrics": dict(metrics)}
    if error is not None:
        facets["errorMessage"] = {"message": error, "programmingLanguage": "Python"}
    return {
        "eventType": event_type,
        "eventTime": datetime.fromtimestamp(at, UTC).isoformat(),
        "producer": PRODUCER,
        "schemaURL": f"{_EVENT_SCHEMA}/RunEvent",
        "run": {"runId": run.run_id, "facets": _with_schemas(facets)},
        "job": {"namespace": run.job_namespace, "name": run.job_name},
        "inputs": [_dataset(ref, uri) for ref, uri in (inputs or {}).items()],
        "outputs": [_dataset(ref, uri) for ref, uri in (outputs or {}).items()],
    }


def model_ref(name: str, manifest_digest: str) -> DatasetRef:
    """Return a model's version as OpenLineage names it: a dataset whose version is the digest of its manifest."""
    return DatasetRef(MODELS_NAMESPACE, f"models/{name}", manifest_digest)


def parse_dataset(text: str) -> tuple[DatasetRef, str]:
    """Return the dataset and URI of `URI@VERSION`, named as OpenLineage's conventions do. A path is a file's URI.

    Raises RegistryError: it has no version.
    """
    uri, _, version = text.rpartition("@")
    if not uri or not version:
        raise RegistryError(
            f"the dataset {short_repr(text)} has no version; allowed is URI@VERSION, such as "
            "file:///data/scenes@sha256:… or s3://bucket/scenes@2026-11."
        )
    return dataset_ref(uri, version)


def dataset_ref(uri: str, version: str = "") -> tuple[DatasetRef, str]:
    """Return a dataset and its URI, named as OpenLineage's conventions do: by its store, and its path there."""
    if not re.match(r"[A-Za-z][A-Za-z0-9+.-]+:", uri):
        uri = pathlib.Path(uri).expanduser().absolute().as_uri()
    parts = urlsplit(uri)
    if parts.scheme == "file":
        return DatasetRef("file", parts.path, version), uri
    return DatasetRef(f"{parts.scheme}://{parts.netloc}", parts.path.lstrip("/") or "/", version), uri


def as_lines(events: Sequence[Mapping[str, Any]]) -> bytes:
    """Return events as JSON, one a line."""
    return b"".join(msgspec.json.encode(event) + b"\n" for event in events)


def _dataset(ref: DatasetRef, uri: str | None) -> dict[str, Any]:
    facets: dict[str, dict[str, Any]] = {}
    if ref.version:
        facets["version"] = {"datasetVersion": ref.version}
    if uri is not None:
        facets["dataSource"] = {"name": ref.namespace, "uri": uri}
    if ref.namespace == MODELS_NAMESPACE:
        facets["datasetType"] = {"datasetType": "MODEL"}
    return {"namespace": ref.namespace, "name": ref.name, "facets": _with_schemas(facets)}


def _with_schemas(facets: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Add what every facet must have: who made it, and its schema."""
    return {name: {"_producer": PRODUCER, "_schemaURL": _schema_url(name), **facet} for name, facet in facets.items()}


def _schema_url(facet: str) -> str:
    if facet not in _SCHEMAS:
        return f"{_EVENT_SCHEMA}/RunFacet"
    path = _SCHEMAS[facet]
    return f"{_SPEC}/facets/{path}.json#/$defs/{path.partition('/')[2]}"


def _text(value: Any) -> str:
    """Return a parameter's value as text, which the specification wants."""
    return value if isinstance(value, str) else msgspec.json.encode(value, enc_hook=str).decode()
