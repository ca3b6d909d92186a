"""`noria bench deploys`: latencies before, while and after versions of models are deployed, by the niceness of loading.

Each niceness gets a fresh server with an image model and a text encoder, in rounds, of which the odd ones go backwards.
Users of both kinds never stop asking; meanwhile a version of each model with other weights is deployed, one after the
other, for all requests. Ctrl-C and SIGTERM keep what was measured.
"""

import contextlib
import pathlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from noria.canary.judge import JudgeSettings
from noria.config import Config
from noria.protocol.model_spec import ModelSpec
from noria.registry.changes import Change
from noria.registry.deployments.store import DeploymentStore
from noria.registry.model_folder import read_model
from noria.registry.model_store import ModelStore
from noria.registry.schema import open_registry_database
from noria.testing.server import RunningServer, config_flags, running_server
from noria_bench.deploys.options import DeploysOptions
from noria_bench.deploys.report import write_report
from noria_bench.deploys.results import FILE_NAME, DeploysResult, DeploysRun, Kind, Span, num_failed, phases_of
from noria_bench.encoders.corpus import FIXED_TEXT
from noria_bench.load.closed_loop import Reply, run_closed_loop
from noria_bench.load.workload import uniform
from noria_bench.measurement.provenance import collect_provenance
from noria_bench.running import (
    Background,
    in_background,
    make_results_folder,
    open_both_models,
    run_to_end,
    status_log,
    write_json,
)
from noria_bench.targets.server import isolated_config

_log_status = status_log("deploys")
_WARM_UP_S = 5.0  # until all users have been answered
_SETTLE_S = 6.0  # after a phase, until what was sent in it is answered: it belongs to that phase alone
_POLL_S = 0.5  # each asks the database; ten times as often took 0.05 of a core from the images
_MAX_LOAD_S = 600.0
_MAX_S = 3600.0  # longer than a run; the users end with it
_CHANGED_BYTES = 4096  # weights that the second version has as zeros


def main(config: Config, options: DeploysOptions, folder: pathlib.Path) -> int:
    """Measure, write JSON, the report and the plot into `folder`, print the report; returns the exit status.

    It is 1 if a request failed.

    Raises:
        NoriaError: a model is not of its kind, or the folder cannot be created.

    """
    make_results_folder(folder)
    with tempfile.TemporaryDirectory(prefix="noria-deploys-") as name:
        bench = DeploysBench(isolated_config(config, name), options, folder, pathlib.Path(name))
        status = run_to_end(bench.measure, _log_status, bench.failures)
    if bench.runs:
        print(write_report(bench.result(), folder)[0].read_text(encoding="utf-8"))
    return status or int(num_failed(bench.runs) > 0)


@dataclass
class DeploysBench:
    """The state of the bench: what has been measured so far."""

    config: Config
    options: DeploysOptions
    folder: pathlib.Path
    work: pathlib.Path  # temporary
    runs: list[DeploysRun] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    complete: bool = False

    def __post_init__(self) -> None:
        self.config, self.images, self.texts = open_both_models(self.config)
        self._provenance = collect_provenance()

    def measure(self) -> None:
        """Measure everything; saves after each run."""
        versions = {kind: self._second_version(kind, spec) for kind, spec in self._models.items()}
        for number in range(self.options.num_rounds):
            for niceness in self.options.niceness if number % 2 == 0 else reversed(self.options.niceness):
                self.runs.append(self._measure(niceness, number, versions))
                write_json(self.result(), self.folder / FILE_NAME)
        self.complete = True
        write_json(self.result(), self.folder / FILE_NAME)

    def result(self) -> DeploysResult:
        """The document so far."""
        return DeploysResult(
            provenance=self._provenance,
            models={kind: spec.name for kind, spec in self._models.items()},
            options=asdict(self.options),
            runs=self.runs,
            failures=self.failures,
            complete=self.complete,
        )

    @property
    def _models(self) -> dict[Kind, ModelSpec]:
        return {"images": self.images, "texts": self.texts}

    def _second_version(self, kind: Kind, spec: ModelSpec) -> pathlib.Path:
        """A copy of a model with other weights. Raises RuntimeError: it has no file of weights that is known."""
        copy = self.work / f"second-{kind}"
        shutil.copytree(spec.folder, copy)
        files = sorted(copy.rglob("*.safetensors"), key=lambda file: file.stat().st_size)
        if not files:
            raise RuntimeError(f"{spec.folder} has no .safetensors file, so that no second version can be made")
        with files[-1].open("r+b") as weights:
            weights.seek(-_CHANGED_BYTES, 2)
            weights.write(bytes(_CHANGED_BYTES))
        return copy

    def _measure(self, niceness: int, number: int, versions: dict[Kind, pathlib.Path]) -> DeploysRun:
        name = f"round {number + 1}, niceness {niceness}"
        _log_status(f"{name}: starting")
        data = self.work / f"data-{niceness}-{number}"
        engine = msgspec.structs.replace(
            self.config.engine,
            mount_niceness=niceness,
            cache_dir=str(self.work / f"cache-{niceness}-{number}"),  # each server exports the second encoder anew
        )
        config = msgspec.structs.replace(self.config, engine=engine)
        with running_server([config.model, *config_flags(config), "--data-dir", str(data)]) as server:
            registry = open_registry_database("auto", data)
            try:
                with self._users(server) as replies:
                    time.sleep(_WARM_UP_S)
                    spans = list(self._deploy_all(ModelStore(registry), DeploymentStore(registry), versions, name))
            finally:
                registry.dispose()
        return DeploysRun(niceness, number, phases_of(spans, replies))

    def _deploy_all(
        self, models: ModelStore, deployments: DeploymentStore, versions: dict[Kind, pathlib.Path], name: str
    ) -> Iterator[Span]:
        """Deploy the second version of each model, and yield the phases. Raises RuntimeError if that fails."""
        yield self._wait("before")
        for kind, spec in self._models.items():
            models.add(f"second-{kind}", read_model(str(versions[kind])), _change())
            began = time.monotonic()
            new, _ = deployments.deploy(spec.name, f"second-{kind}", None, JudgeSettings(), _change())
            while (found := deployments.find(new.id)).state == "pending" and time.monotonic() < began + _MAX_LOAD_S:
                time.sleep(_POLL_S)
            if found.state != "serving":
                raise RuntimeError(f"{found.title} does not serve: {found.last_change.why or 'it is not loaded yet'}")
            ended = time.monotonic()
            _log_status(f"{name}: the second version of {spec.name} serves after {ended - began:.1f} s")
            yield Span(f"{kind}: loading", began, ended)
            yield self._wait(f"{kind}: after")

    def _wait(self, name: str) -> Span:
        began = time.monotonic()
        time.sleep(self.options.seconds)
        span = Span(name, began, time.monotonic())
        time.sleep(_SETTLE_S)
        return span

    @contextlib.contextmanager
    def _users(self, server: RunningServer) -> Iterator[dict[Kind, list[Reply]]]:
        """Users of both kinds; their replies are complete at the end."""
        replies: dict[Kind, list[Reply]] = {"images": [], "texts": []}

        def use(kind: Kind, num_users: int, path: str, body: Callable[[int], dict[str, Any]]) -> Background:
            pause_s = self.options.pause_s
            return lambda ended: replies[kind].extend(
                run_closed_loop(server.port, num_users, _MAX_S, body, path, ended=ended, pause_s=pause_s)
            )

        with (
            in_background(use("images", self.options.image_users, "/t2i", self._image_body)),
            in_background(use("texts", self.options.text_users, "/v1/embeddings", self._text_body)),
        ):
            yield replies

    def _image_body(self, number: int) -> dict[str, Any]:
        template = next(uniform(self.images).templates(self.options.seed + number))
        return template.body | {"metadata": False}

    def _text_body(self, number: int) -> dict[str, Any]:
        return {"input": FIXED_TEXT, "model": self.texts.name, "user": str(number)}


def _change() -> Change:
    return Change(time.time(), "bench")
