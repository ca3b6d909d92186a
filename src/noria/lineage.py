"""Records what a script does as a run of the registry, in OpenLineage's events.

For example::

    from noria.lineage import Run, version_of

    with Run("train", to="http://127.0.0.1:8000", inputs=[version_of("scenes")], params={"rate": 1e-3}) as run:
        with run.step("encode", inputs=["s3://bucket/words@2026-11"]) as step:
            step.output(version_of("latents"))
        run.metric("loss", 0.047)
        run.output_model("shapes", "out/pipeline")

The run begins and ends with the block, and fails with its exception. `noria models add shapes out/pipeline` then adds
the model, and `noria trace shapes` prints the run, its steps and the versions of all data.
"""

import hashlib
import logging
import os
import pathlib
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Self

import msgspec

from noria.errors import RegistryError
from noria.registry.lineage.openlineage import DatasetRef, EventType, parse_event
from noria.registry.lineage.run_events import RunId, as_lines, dataset_ref, model_ref, parse_dataset, run_event
from noria.registry.manifest import format_digest, read_manifest

Data = str | DatasetRef
"""Data as `URI@VERSION`, or as OpenLineage's namespace and name, and a version."""

REGISTRY = "registry"
"""Where to send events: the registry that the settings name, without a server."""

_NUM_TRIES, _RETRY_AFTER_S, _TIMEOUT_S = 3, 1.0, 10.0

log = logging.getLogger("noria.lineage")


def version_of(path: str | os.PathLike[str]) -> str:
    """Return a file or folder as `URI@VERSION`, where the version is the SHA-256 of its content.

    Raises ModelError, OSError: it cannot be read.
    """
    path = pathlib.Path(path).absolute()
    if path.is_dir():
        return f"{path.as_uri()}@{read_manifest(path).digest}"
    with path.open("rb") as opened:
        return f"{path.as_uri()}@{format_digest(hashlib.file_digest(opened, 'sha256'))}"


class Run:
    """A run, as a context manager; sends events to `to`: `registry`, the URL of a server, or a file of lines.

    A server with API keys needs one with the scope `lineage`, by default that in $OPENLINEAGE_API_KEY. A script that
    is stopped and goes on later is one run if it gives the same `run_id`, a UUID.
    """

    def __init__(
        self,
        job: str,
        *,
        to: str | os.PathLike[str] = REGISTRY,
        inputs: Iterable[Data] = (),
        params: Mapping[str, Any] | None = None,
        namespace: str = "default",
        api_key: str | None = None,
        run_id: str | None = None,
        parent: "Run | None" = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._id = RunId(run_id or str(uuid.uuid4()), namespace, job)
        self._parent, self._clock = parent, clock
        self._send: Callable[[dict[str, Any]], None] = (
            _sender(os.fspath(to), api_key) if parent is None else parent._send
        )
        self._inputs = dict(map(_named, inputs))
        self._outputs: dict[DatasetRef, str | None] = {}
        self._params, self._metrics = dict(params or {}), dict[str, float]()

    @property
    def run_id(self) -> str:
        """The run's id, a UUID."""
        return self._id.run_id

    def __enter__(self) -> Self:
        """Send the beginning. Raises RegistryError: it cannot be sent, so that a script notices before its work."""
        self._send(self._event("START"))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Send the end. If it cannot be sent, it is kept in a file, and a warning is logged: the work is done."""
        event_type: EventType = "COMPLETE"
        if error is not None:
            event_type = "FAIL" if isinstance(error, Exception) else "ABORT"
        event = self._event(event_type, None if error is None else f"{type(error).__name__}: {error}")
        try:
            self._send(event)
        except Exception as unsent:  # errors of a database, for example: none may hide the exception of the block
            self._keep(event, unsent)

    def _keep(self, event: dict[str, Any], unsent: Exception) -> None:
        file = pathlib.Path(f"noria-lineage-{self.run_id}.jsonl").absolute()
        try:
            _append(file, event)
        except RegistryError as error:
            log.error("%s %s The event is: %s", unsent, error.message, as_lines([event]).decode())
        else:
            log.warning("%s The event is kept in %s; post its lines later.", unsent, file)

    def param(self, name: str, value: Any) -> None:
        """Record a parameter of the run."""
        self._params[name] = value

    def metric(self, name: str, value: float) -> None:
        """Record a metric; the last value of a name is kept."""
        self._metrics[name] = float(value)

    def input(self, data: Data) -> None:
        """Record that the run reads data."""
        self._inputs |= [_named(data)]

    def output(self, data: Data) -> None:
        """Record that the run writes data."""
        self._outputs |= [_named(data)]

    def input_model(self, name: str, folder: str | os.PathLike[str]) -> None:
        """Record that the run begins with a model. Raises ModelError: the folder cannot be read."""
        self._inputs |= [_model(name, folder)]

    def output_model(self, name: str, folder: str | os.PathLike[str]) -> None:
        """Record that the run makes a model; call it when all files are written. Raises ModelError."""
        self._outputs |= [_model(name, folder)]

    def step(self, job: str, *, inputs: Iterable[Data] = (), params: Mapping[str, Any] | None = None) -> "Run":
        """Return a step of this run, which is a run, too."""
        return Run(job, inputs=inputs, params=params, namespace=self._id.job_namespace, parent=self, clock=self._clock)

    def _event(self, event_type: EventType, error: str | None = None) -> dict[str, Any]:
        return run_event(
            event_type,
            self._clock(),
            self._id,
            parent=None if self._parent is None else self._parent._id,
            inputs=self._inputs,
            outputs=self._outputs,
            params=self._params,
            metrics=self._metrics,
            error=error,
        )


def _named(data: Data) -> tuple[DatasetRef, str | None]:
    return parse_dataset(data) if isinstance(data, str) else (data, None)


def _model(name: str, folder: str | os.PathLike[str]) -> tuple[DatasetRef, str | None]:
    path = pathlib.Path(folder)
    return model_ref(name, read_manifest(path).digest), dataset_ref(str(path))[1]


def _sender(to: str, api_key: str | None) -> Callable[[dict[str, Any]], None]:
    """Return what sends an event; it raises RegistryError or ConfigError."""
    if to == REGISTRY:
        return _record
    if to.startswith(("http://", "https://")):
        key = os.environ.get("OPENLINEAGE_API_KEY") if api_key is None else api_key
        return lambda event: _post(f"{to.rstrip('/')}/api/v1/lineage", key, event)
    return lambda event: _append(pathlib.Path(to), event)


def _record(event: dict[str, Any]) -> None:
    from noria.registry.lineage.store import LineageStore
    from noria.registry.model_store import user_name
    from noria.registry.schema import open_registry
    from noria.settings import load

    store = LineageStore(open_registry(load(None, os.environ, {})))
    try:
        store.record([parse_event(msgspec.json.encode(event))], user_name(), time.time())
    finally:
        store.close()


def _append(file: pathlib.Path, event: dict[str, Any]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("ab") as opened:
            opened.write(as_lines([event]))
    except OSError as error:
        raise RegistryError(f"{file} cannot be written: {error.strerror}.") from error


def _post(url: str, key: str | None, event: dict[str, Any]) -> None:
    import httpx2

    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    for number in range(_NUM_TRIES):
        if number:
            time.sleep(_RETRY_AFTER_S * number)
        try:
            response = httpx2.post(url, content=msgspec.json.encode(event), headers=headers, timeout=_TIMEOUT_S)
        except httpx2.HTTPError as error:
            reason = str(error) or type(error).__name__
            continue
        if response.status_code < 300:
            return
        reason = f"{response.status_code} {response.text[:300]}"
        if response.status_code < 500:
            break
    raise RegistryError(f"{url} did not accept an event: {reason}.")
