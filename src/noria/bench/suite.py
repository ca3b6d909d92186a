"""Runs one after the other: a fresh server, warm-up, load, a look at what it drew, and a JSON file for each.

A server that fails to start, or ends under load, is reported and the next one is begun; Ctrl-C keeps what the run that it hit has
recorded, and so does SIGTERM. In any case the tables are made of what there is.
"""

import http.client
import os
import pathlib
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import msgspec

from noria.bench import clients, peers, runs
from noria.bench.clients import Body, Load
from noria.bench.machine import provenance
from noria.bench.meters import Gpus, find_gpus, matrix_gflops
from noria.bench.runs import BenchRun, Sample
from noria.bench.samples import SoloRuns, check
from noria.bench.server import DIRECT, RunningServer, apart, running_target
from noria.bench.targets.catalog import Target, TargetSettings
from noria.bench.watching import Observations, watched
from noria.config import Config
from noria.errors import ConfigError, NoriaError
from noria.models.catalog import open_model
from noria.observe.process import sigterm_interrupts
from noria.spec import ModelSpec

_WARM_UP_USERS = 8
_SAMPLE_S = 0.5

Report = Callable[[pathlib.Path, Sequence[BenchRun]], list[pathlib.Path]]


@dataclass(frozen=True)
class Plan:
    """One run to be made; `settings` are turned at targets that are not Noria: None, their own."""

    bench: str
    target: Target
    load: Load
    config: Config
    settings: TargetSettings | None = None
    variant: str = ""

    @property
    def name(self) -> str:
        """As its progress is told."""
        return " ".join(filter(None, (self.bench, self.target.name, self.variant and f"({self.variant})")))

    @property
    def told_settings(self) -> dict[str, Any]:
        """The engine's, and the target's own beside them, with the peer's version."""
        found: dict[str, Any] = msgspec.to_builtins(self.config.engine)
        del found["cache_dir"]  # the bench's own, for as long as it lasts
        if self.target.module is not None:
            found |= msgspec.to_builtins(self.settings or self.target.settings)
        if self.target.peer is not None:
            found["peer"] = peers.REQUIREMENTS[self.target.peer]
        return found


@dataclass
class Suite:
    """A bench as far as it has come."""

    config: Config
    folder: pathlib.Path
    spec: ModelSpec
    runs: list[BenchRun] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)  # what did not go well, a line each
    _solo: tuple[bytes, SoloRuns] | None = None  # the last engine settings', since each holds a model

    def run(self, plan: Plan) -> None:
        """Make one run and write it; one that is cut short is written too, as incomplete, if it has recorded anything.

        Raises:
            RuntimeError: the server did not start, or ended; or the client did.

        """
        about = provenance()
        if plan.target.peer is not None:
            about["peer_versions"] = peers.versions_of(plan.target.peer)
        with tempfile.TemporaryDirectory(prefix="noria-bench-") as name:
            folder = pathlib.Path(name)
            seen, samples, ready_s = Observations(), tuple[Sample, ...](), None
            try:
                say(f"{plan.name}: starting")
                seen.matrix_gflops.append(matrix_gflops())
                gpus = find_gpus(plan.config.engine.devices, os.environ)
                if gpus is not None:
                    about["machine"]["gpu"] = ", ".join(gpus.names)
                with running_target(plan.target, self.spec, plan.config, plan.settings) as server:
                    ready_s = server.seconds_to_ready
                    self._load(plan, server, gpus, folder, seen)
                seen.matrix_gflops.append(matrix_gflops())
                say(f"{plan.name}: comparing some of its images with their solo runs")
                samples = check(folder / "kept", plan.load.body, self._solo_runs(plan.config).draw)
            except BaseException:
                self._keep(self._run(plan, about, folder, seen, samples, ready_s, complete=False))
                raise
            self._keep(self._run(plan, about, folder, seen, samples, ready_s, complete=True))

    def _load(
        self, plan: Plan, server: RunningServer, gpus: Gpus | None, folder: pathlib.Path, seen: Observations
    ) -> None:
        """Warm a server up and load it; `seen` is filled, whatever happens."""
        url = f"http://127.0.0.1:{server.port}"
        say(f"{plan.name}: ready after {server.seconds_to_ready:.0f} s; warming up")
        warm_up(url + plan.target.path, plan.load.warm_up)
        with watched(server, gpus, _SAMPLE_S, seen):
            clients.send(plan.load, url, plan.target.path, folder, server.process, self._progress(plan))

    def _progress(self, plan: Plan) -> Callable[[str], None]:
        return lambda words: say(f"{plan.name}: {words}")

    def _solo_runs(self, config: Config) -> SoloRuns:
        key = msgspec.json.encode(config.engine)
        if self._solo is None or self._solo[0] != key:
            self._solo = key, SoloRuns(self.spec, config.engine)
        return self._solo[1]

    def _run(
        self,
        plan: Plan,
        about: dict[str, Any],
        folder: pathlib.Path,
        seen: Observations,
        samples: tuple[Sample, ...],
        ready_s: float | None,
        *,
        complete: bool,
    ) -> BenchRun:
        spec = self.spec
        return BenchRun(
            bench=plan.bench,
            target=plan.target.name,
            traffic=plan.load.traffic,
            about=about,
            model={"name": spec.name, "fingerprint": spec.fingerprint, "unet_parameters": spec.num_parameters},
            settings=plan.told_settings,
            records=tuple(clients.records(folder)),
            usage=seen.usage,
            samples=samples,
            variant=plan.variant,
            complete=complete,
            seconds_to_ready=ready_s,
        )

    def _keep(self, run: BenchRun) -> None:
        if run.records or run.complete:
            self.runs.append(run)
            file = runs.write(run, self.folder)
            say(f"{run.target}: {in_words(run)}; wrote {file}")


def main(
    config: Config, folder: pathlib.Path, plans: Callable[[Config, ModelSpec], Iterable[Plan]], report: Report
) -> int:
    """Make the runs that `plans` gives, one by one, and the report of all of them; returns the exit status.

    `plans` is given the settings of servers that keep nothing for after the bench; it may take its time, and measure.

    Raises:
        NoriaError: the model cannot be opened, or the folder not made.

    """
    spec = open_model(config.model)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--out {folder} cannot be made ({error}); name a folder, or one that is not there."
        ) from error
    with sigterm_interrupts(), tempfile.TemporaryDirectory(prefix="noria-bench-") as cache:
        suite = Suite(apart(config, cache), folder, spec)
        status = _run_all(suite, plans)
    if suite.runs:
        for file in report(folder, suite.runs):
            say(f"wrote {file}")
            if file.suffix == ".md":
                print(file.read_text(encoding="utf-8"))
    for failure in suite.failures:
        say(failure)
    return status


def _run_all(suite: Suite, plans: Callable[[Config, ModelSpec], Iterable[Plan]]) -> int:
    """Returns the exit status; every plan is tried, until somebody interrupts."""
    try:
        for plan in plans(suite.config, suite.spec):
            try:
                suite.run(plan)
            except (RuntimeError, OSError, NoriaError) as error:
                suite.failures.append(f"{plan.name} failed: {error}")
                say(suite.failures[-1])
    except KeyboardInterrupt:
        say("interrupted; what follows is what was measured until now")
        return 130
    except (RuntimeError, OSError, NoriaError) as error:  # of the plans: Noria's capacity could not be measured
        suite.failures.append(f"stopped: {error}")
    return 1 if suite.failures else 0


def warm_up(url: str, bodies: Sequence[Body]) -> None:
    """Ask for everything once, eight at a time; errors do not matter here, since they come again and are counted then."""

    def ask(body: Body) -> None:
        text = msgspec.json.encode(body)
        request = urllib.request.Request(url, text, {"content-type": "application/json"})  # noqa: S310 - our own server
        try:
            with DIRECT.open(request, timeout=300) as answer:
                answer.read()
        except (OSError, http.client.HTTPException):
            time.sleep(0.05)  # a server that refuses is not asked in a hot loop

    with ThreadPoolExecutor(_WARM_UP_USERS) as users:
        list(users.map(ask, bodies))


def in_words(run: BenchRun) -> str:
    """What came of a run, for who is watching."""
    seconds = run.lasted_s or run.traffic.seconds
    failed = sum(record.status != 200 for record in run.records)
    done = sum(record.status == 200 and (record.done_s or 0.0) <= seconds for record in run.records)
    wrong = [sample for sample in run.samples if sample.wrong]
    words = [f"{len(run.records)} requests", f"{done / seconds:.2f}/s", f"{failed} failed"]
    words.append(f"{len(wrong)} of {len(run.samples)} images looked at are wrong")
    words += [f"request {sample.number} {sample.wrong}" for sample in wrong[:3]]
    return ", ".join(words) + ("" if run.complete else "; incomplete")


def say(text: str) -> None:
    """Tell who is watching."""
    print(f"noria bench: {text}", file=sys.stderr, flush=True)
