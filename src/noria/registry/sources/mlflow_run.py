"""A run of MLflow as a run of the registry, in OpenLineage's events. Pure.

An input that MLflow calls a dataset is named by where its source is, or, if MLflow does not know, by MLflow's own name.
Lineage is kept and shown, so the user, the query and the fragment of its URL are left out: they may hold secrets.
Its version is `mlflow-` and MLflow's digest, which is 8 digits of an MD5 over at most 10,000 rows: no SHA-256.
"""

import re
import uuid
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import msgspec
from msgspec import Struct

from noria.errors import ModelError, RequestError, short_repr
from noria.observe.logs.redaction import redact
from noria.registry.lineage.openlineage import DatasetRef, Event, EventType, parse_event
from noria.registry.lineage.run_events import RunId, dataset_ref, run_event

_EVENT_TYPES: dict[str, EventType] = {"FINISHED": "COMPLETE", "FAILED": "FAIL", "KILLED": "ABORT"}
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+://.+")


class _Pair(Struct, frozen=True):
    key: str
    value: str = ""


class _Metric(Struct, frozen=True):
    key: str
    value: float | str = ""  # NaN and infinities are texts


class _Data(Struct, frozen=True):
    params: tuple[_Pair, ...] = ()
    metrics: tuple[_Metric, ...] = ()  # the last value of each


class _Info(Struct, frozen=True):
    run_id: str
    experiment_id: str
    status: str
    start_time: int  # in ms
    end_time: int = 0
    artifact_uri: str = ""


class _Dataset(Struct, frozen=True):
    name: str
    digest: str
    source: str = ""  # JSON, of a form that depends on its type


class _DatasetInput(Struct, frozen=True):
    dataset: _Dataset


class _Inputs(Struct, frozen=True):
    dataset_inputs: tuple[_DatasetInput, ...] = ()


class MlflowRun(Struct, frozen=True):
    """The answer of `runs/get`, and the name of its experiment."""

    info: _Info
    experiment: str = ""
    data: _Data = _Data()
    inputs: _Inputs = _Inputs()


def events_of(run: MlflowRun, server: str, output: DatasetRef, output_url: str) -> list[Event]:
    """Return the events of a run on the server with this URL that made the model `output`.

    Raises ModelError: the registry cannot keep what the server says of the run.
    """
    try:
        events = _events(run, server, output, output_url)
        return [parse_event(msgspec.json.encode(event))._replace(sender=f"mlflow {server}") for event in events]
    except (ValueError, OverflowError, RequestError) as error:
        raise ModelError(
            f"the run {short_repr(run.info.run_id)} of the MLflow server {server} cannot be recorded: "
            f"{str(error).rstrip('.')}. Correct it there, or add the model's folder."
        ) from error


def _events(run: MlflowRun, server: str, output: DatasetRef, output_url: str) -> list[dict[str, Any]]:
    run_id = RunId(str(uuid.UUID(run.info.run_id)), server, run.experiment)
    inputs = dict(_dataset(each.dataset, server) for each in run.inputs.dataset_inputs)
    end = run_event(
        _EVENT_TYPES.get(run.info.status, "RUNNING"),
        (run.info.end_time or run.info.start_time) / 1000,
        run_id,
        inputs=inputs,
        outputs={output: output_url},
        params={param.key: param.value for param in run.data.params},
        metrics={metric.key: metric.value for metric in run.data.metrics if not isinstance(metric.value, str)},
    )
    start = run_event("START", run.info.start_time / 1000, run_id)
    return [start, end]


def _dataset(dataset: _Dataset, server: str) -> tuple[DatasetRef, str | None]:
    version = f"mlflow-{dataset.digest}"
    try:
        source = msgspec.json.decode(dataset.source, type=dict[str, object])
    except msgspec.DecodeError:
        source = {}
    for key in ("uri", "url", "path"):
        url = source.get(key)
        if isinstance(url, str) and _URL.fullmatch(url) and (public := _without_secrets(url)) is not None:
            return dataset_ref(public, version)
    return DatasetRef(server, dataset.name, version), None


def _without_secrets(url: str) -> str | None:
    """Return the scheme, the host and the path of a URL; None: it is no URL, or its path looks like a secret."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return None
    public = urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))
    return public if redact(public) == public else None
