"""Versions of models that an MLflow server has registered: their artifacts, and the run that made them. Blocks.

Asked by MLflow's REST API. Credentials go to the origin of the server's URL only: no redirect is followed, and
artifacts are read from the same origin, or from one of the `_STORES`, with credentials of its own.
"""

import posixpath
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import httpx2
import msgspec

from noria.errors import ModelError, short_repr
from noria.observe.logs.redaction import redact
from noria.registry.sources.filesystem import open_filesystem
from noria.registry.sources.mlflow_run import MlflowRun
from noria.registry.sources.remote_folder import CHUNK_BYTES, RemoteFile, RemoteFolder, check_num_entries, one_line
from noria.registry.sources.source import FilesystemSource, MlflowSource, Source, parse_source

_API = "api/2.0/mlflow"
_ARTIFACTS = "api/2.0/mlflow-artifacts/artifacts"
_STORES = ("s3", "gs", "gcs", "abfs", "abfss", "az", "oss")
"""Filesystems that a server may name: no folders of this machine, and nothing that connects to a host of its choice."""
_TIMEOUT_S = 60.0  # a server that keeps artifacts elsewhere fetches a file first
_MAX_JSON_BYTES = 67_108_864
_T = TypeVar("_T")
_RUN_PATH = re.compile(r"runs:/(?P<run>[0-9a-f]{32})/(?P<path>.+)")


class _ModelVersion(msgspec.Struct, frozen=True):
    name: str
    version: str
    run_id: str = ""


class _Experiment(msgspec.Struct, frozen=True):
    name: str


class _Artifact(msgspec.Struct, frozen=True):
    path: str
    is_dir: bool = False
    file_size: int = 0


class MlflowClient:
    """Asks one server. Close it."""

    def __init__(self, url: str, environment: Mapping[str, str]) -> None:
        user, token = environment.get("MLFLOW_TRACKING_USERNAME"), environment.get("MLFLOW_TRACKING_TOKEN")
        password = environment.get("MLFLOW_TRACKING_PASSWORD", "")
        self._url = url
        self._client = httpx2.Client(
            base_url=f"{url}/",
            auth=(user, password) if user else None,
            headers={"Authorization": f"Bearer {token}"} if token and not user else {},
            follow_redirects=False,
            timeout=_TIMEOUT_S,
        )

    def close(self) -> None:
        """Close its connections."""
        self._client.close()

    def open(
        self, source: MlflowSource, check: Callable[[Source], Source] = lambda store: store
    ) -> tuple[RemoteFolder, MlflowRun | None]:
        """List the artifacts of a version, and read its run; None: no run is known.

        `check` raises ModelError if the store that the server names for the artifacts may not be read.

        Raises ModelError: there is no such version, or the server does not answer, or it does not serve its artifacts.
        """
        if source.alias is not None:
            found = self._get(f"{_API}/registered-models/alias", name=source.model, alias=source.alias)
        else:
            found = self._get(f"{_API}/model-versions/get", name=source.model, version=str(source.number))
        version = self._as(found.get("model_version"), _ModelVersion)
        named = {"name": version.name, "version": version.version}
        uri = self._get(f"{_API}/model-versions/get-download-uri", **named).get("artifact_uri")
        folder = self._open_artifacts(str(uri), f"{version.name}/{version.version}", check)
        return folder, self._read_run(version.run_id) if version.run_id else None

    def _read_run(self, run_id: str) -> MlflowRun:
        run = self._as(self._get(f"{_API}/runs/get", run_id=run_id).get("run"), MlflowRun)
        found = self._get(f"{_API}/experiments/get", experiment_id=run.info.experiment_id)
        experiment = self._as(found.get("experiment"), _Experiment)
        return msgspec.structs.replace(run, experiment=experiment.name)

    def _open_artifacts(self, uri: str, revision: str, check: Callable[[Source], Source]) -> RemoteFolder:
        if (of_run := _RUN_PATH.fullmatch(uri)) is not None:
            uri = f"{self._read_run(of_run['run']).info.artifact_uri}/{of_run['path']}"
        try:
            parts = urlsplit(uri)
        except ValueError as error:
            raise ModelError(
                f"{self._url} keeps the artifacts of {revision} in a URI that is none: {error}."
            ) from error
        if parts.scheme in _STORES and isinstance(store := parse_source(uri, {}), FilesystemSource):
            check(store)
            return open_filesystem(store.url, revision)
        if parts.scheme != "mlflow-artifacts" or parts.netloc not in ("", urlsplit(self._url).netloc):
            raise ModelError(
                f"{self._url} keeps the artifacts of {revision} in {redact(short_repr(uri))}; allowed are its "
                f"own and {', '.join(_STORES)}. Start the server with --serve-artifacts and --artifacts-destination, "
                "or add the folder."
            )
        root = parts.path.strip("/")
        files = tuple(sorted(self._list(root, revision), key=lambda file: file.path))
        return RemoteFolder(
            f"{self._url}/{_ARTIFACTS}/{root}", revision, files, lambda path: self._read(f"{root}/{path}")
        )

    def _list(self, root: str, revision: str) -> Iterator[RemoteFile]:
        folders, num_files = [""], 0
        for folder in folders:
            listed = self._get(_ARTIFACTS, path=posixpath.join(root, folder)).get("files", [])
            for entry in self._as(listed, list[_Artifact]):
                path = posixpath.join(folder, posixpath.basename(entry.path))
                num_files += 1
                check_num_entries(num_files, f"{self._url}/{root}")
                if entry.is_dir:
                    folders.append(path)
                else:
                    yield RemoteFile(path, entry.file_size, state=revision)  # all that MLflow says of the content

    def _read(self, path: str) -> Iterator[bytes]:
        with self._client.stream(
            "GET", f"{_ARTIFACTS}/{quote(path)}", headers={"Accept-Encoding": "identity"}
        ) as response:
            if response.status_code != 200:
                raise ModelError(f"{self._url}: {path} cannot be read: the server answers {response.status_code}.")
            yield from response.iter_bytes(CHUNK_BYTES)

    def _get(self, path: str, /, **parameters: str) -> dict[str, Any]:
        try:
            with self._client.stream("GET", path, params=parameters) as response:
                content = b""
                for chunk in response.iter_bytes():
                    content += chunk
                    if len(content) > _MAX_JSON_BYTES:
                        raise ModelError(f"{self._url}/{path} answers with more than {_MAX_JSON_BYTES} bytes.")
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise ModelError(
                f"the MLflow server {self._url} does not answer: {one_line(error)}. Check MLFLOW_TRACKING_URI and the "
                "network."
            ) from error
        try:
            answer = msgspec.json.decode(content, type=dict[str, Any])
        except msgspec.DecodeError:
            answer = {}
        if response.status_code != 200:
            reason = redact(str(answer.get("message", "")).partition("\n")[0].rstrip("."))
            raise ModelError(
                f"the MLflow server {self._url} answers {response.status_code}: {reason or 'no reason'}. Check the "
                "name, MLFLOW_TRACKING_URI, and MLFLOW_TRACKING_TOKEN or MLFLOW_TRACKING_USERNAME and _PASSWORD."
            )
        return answer

    def _as(self, answer: Any, kind: type[_T]) -> _T:
        try:
            return msgspec.convert(answer, kind)
        except msgspec.ValidationError as error:
            raise ModelError(f"{self._url} does not answer as MLflow does: {error}.") from error
