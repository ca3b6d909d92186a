"""Carries out runs one after the other: each has a fresh server, a warm-up, load, a check of some images, and a JSON
file.

A server that fails to start, or that ends under load, is reported, and the next run starts. Ctrl-C and SIGTERM end the
bench and keep what the current run has recorded. In all cases the report is made of what was measured.

A quick suite, for rented devices, makes each run's begin and end short: runs of one server follow each other in one
start of it, warm-ups are shorter, and fewer images are checked.
"""

import contextlib
import os
import pathlib
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec

from noria.config import Config, EngineConfig
from noria.errors import NoriaError
from noria.models.catalog import open_model_of
from noria.protocol.diffusion import DiffusionModelSpec
from noria.protocol.process_signals import sigterm_interrupts
from noria.testing.server import RunningServer
from noria_bench.load import load_generators
from noria_bench.load.load_generators import Body, LoadGenerator
from noria_bench.load.protocols import encode_request
from noria_bench.measurement import runs
from noria_bench.measurement.engine_costs import record_engine_costs
from noria_bench.measurement.hardware_meters import GpuMeter, find_gpus, matrix_gflops
from noria_bench.measurement.image_checks import SoloGenerator, check_replies
from noria_bench.measurement.provenance import collect_provenance
from noria_bench.measurement.resource_monitor import ResourceTrace, monitor_resources
from noria_bench.measurement.run_metrics import attainment
from noria_bench.measurement.runs import BenchRun, ImageCheck
from noria_bench.running import make_results_folder, run_to_end
from noria_bench.targets import environments
from noria_bench.targets.catalog import Protocol, Target, TargetSettings
from noria_bench.targets.server import isolated_config, running_target

_NUM_WARM_UP_USERS = 8
_SAMPLE_INTERVAL_S = 0.5

# The images that a quick suite compares in each run.
_NUM_QUICK_CHECKS = 4
# The part of an error's answer that a message shows.
_MAX_ERROR_BYTES = 300

ReportWriter = Callable[[pathlib.Path, Sequence[BenchRun]], list[pathlib.Path]]


@dataclass(frozen=True)
class RunPlan:
    """A run that is yet to be made.

    `settings` are of a target other than Noria (None: the target's own); `calibration` is stored with the run.
    """

    bench: str
    target: Target
    load_generator: LoadGenerator
    config: Config
    settings: TargetSettings | None = None
    variant: str = ""
    calibration: dict[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The run's name in status messages."""
        return " ".join(filter(None, (self.bench, self.target.name, self.variant and f"({self.variant})")))

    @property
    def server(self) -> tuple[object, ...]:
        """The server that it loads: equal for runs that one start of it can have."""
        return self.target.module or self.target.name, self.settings or self.target.settings, self.config

    @property
    def reported_settings(self) -> dict[str, Any]:
        """The engine's settings, those of a target other than Noria, and the version of a framework."""
        found: dict[str, Any] = msgspec.to_builtins(self.config.engine)
        # A temporary folder of the bench.
        del found["cache_dir"]
        if self.target.module is not None:
            found |= msgspec.to_builtins(self.settings or self.target.settings)
        if self.target.framework is not None:
            found["framework"] = environments.REQUIREMENTS[self.target.framework]
        return found


@dataclass
class _Recording:
    """The facts that are known of a run so far."""

    plan: RunPlan
    header: dict[str, Any]
    resources: ResourceTrace = field(default_factory=ResourceTrace)
    image_checks: tuple[ImageCheck, ...] = ()
    ready_s: float | None = None
    engine_costs: dict[str, Any] = field(default_factory=dict)
    complete: bool = False

    def result(self, spec: DiffusionModelSpec, folder: pathlib.Path) -> BenchRun:
        """The run, with the records that the client has written into `folder`."""
        return BenchRun(
            bench=self.plan.bench,
            target=self.plan.target.name,
            traffic=self.plan.load_generator.traffic,
            provenance=self.header,
            model={"name": spec.name, "fingerprint": spec.fingerprint, "unet_parameters": spec.num_parameters},
            settings=self.plan.reported_settings,
            records=tuple(load_generators.read_records(folder)),
            usage=self.resources.usage,
            image_checks=self.image_checks,
            variant=self.plan.variant,
            complete=self.complete,
            seconds_to_ready=self.ready_s,
            calibration=self.plan.calibration,
            engine_costs=self.engine_costs,
        )


@dataclass
class Suite:
    """The state of a bench: what has been measured so far."""

    config: Config
    folder: pathlib.Path
    spec: DiffusionModelSpec
    quick: bool = False
    runs: list[BenchRun] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)  # a line for each run that failed
    # The generator for the last engine settings only, since each holds a model.
    _solo_generator: tuple[EngineConfig, SoloGenerator] | None = None
    # In a quick suite: the settings of the last run's server, the server, and what ends it.
    _kept: tuple[tuple[object, ...], RunningServer, contextlib.ExitStack] | None = None

    def run_all(self, plans: Iterable[RunPlan]) -> None:
        """Make every run; one that fails does not stop the next."""
        for plan in plans:
            try:
                self.run(plan)
            except (RuntimeError, OSError, NoriaError) as error:
                self.failures.append(f"{plan.name} failed: {error}")
                log_status(self.failures[-1])

    def run(self, plan: RunPlan) -> None:
        """Make one run and write it. A run that is interrupted is written as incomplete, if it has recorded anything.

        Raises:
            RuntimeError: the server did not start, or the server or the client ended too early.

        """
        run = _Recording(plan, collect_provenance())
        if plan.target.framework is not None:
            run.header["framework_versions"] = environments.versions_of(plan.target.framework)
        with tempfile.TemporaryDirectory(prefix="noria-bench-") as name:
            folder = pathlib.Path(name)
            try:
                log_status(f"{plan.name}: starting")
                if self._kept is not None and self._kept[0] != plan.server:
                    self.end_server()
                run.resources.matrix_gflops.append(matrix_gflops())
                gpus = find_gpus(plan.config.engine.devices, os.environ)
                if gpus is not None:
                    run.header["machine"]["gpu"] = ", ".join(gpus.names)
                with self._server_for(plan) as (server, is_fresh):
                    run.ready_s = server.seconds_to_ready
                    self._measure_load(run, server, gpus, folder, is_fresh=is_fresh)
                run.resources.matrix_gflops.append(matrix_gflops())
                log_status(f"{plan.name}: comparing some images with their solo runs")
                run.image_checks = check_replies(
                    folder / load_generators.SAMPLE_FOLDER,
                    plan.load_generator.body,
                    self._solo_generator_for(plan.config).generate,
                    _NUM_QUICK_CHECKS if self.quick else None,
                )
                run.complete = True
            finally:
                self._save(run.result(self.spec, folder))

    def _measure_load(
        self, run: "_Recording", server: RunningServer, gpus: GpuMeter | None, folder: pathlib.Path, *, is_fresh: bool
    ) -> None:
        """Warm a server up and load it; the resources are recorded even if an error is raised, the costs otherwise."""
        plan, url = run.plan, f"http://127.0.0.1:{server.port}{run.plan.target.path}"
        log_status(f"{plan.name}: ready after {server.seconds_to_ready:.0f} s; warming up")
        bodies = plan.load_generator.warm_up_bodies
        if self.quick:
            bodies = bodies[:: -(-len(bodies) // _NUM_WARM_UP_USERS)] if is_fresh else bodies[:1]
        warm_up(url, plan.target.protocol, bodies)
        with contextlib.ExitStack() as stack:
            stack.enter_context(monitor_resources(server, gpus, _SAMPLE_INTERVAL_S, run.resources))
            if plan.target.module is None and plan.load_generator.traffic.kind == "open":
                engine = plan.config.engine
                stack.enter_context(record_engine_costs(server.port, self.spec, engine, run.engine_costs))
            load_generators.run_load(
                plan.load_generator,
                url,
                plan.target.protocol,
                folder,
                server.process,
                lambda text: log_status(f"{plan.name}: {text}"),
            )

    @contextlib.contextmanager
    def _server_for(self, plan: RunPlan) -> Iterator[tuple[RunningServer, bool]]:
        """The plan's server, and whether it was started for it; a quick suite keeps it for the next plan."""
        if not self.quick:
            with running_target(plan.target, self.spec, plan.config, plan.settings) as server:
                yield server, True
            return
        if is_fresh := self._kept is None:
            stack = contextlib.ExitStack()
            server = stack.enter_context(running_target(plan.target, self.spec, plan.config, plan.settings))
            self._kept = plan.server, server, stack
        assert self._kept is not None
        try:
            yield self._kept[1], is_fresh
        except BaseException:
            # The next run must not find what a failed one left behind.
            self.end_server()
            raise

    def end_server(self) -> None:
        """End the server that was kept, if there is one."""
        if self._kept is not None:
            kept, self._kept = self._kept, None
            kept[2].close()

    def _solo_generator_for(self, config: Config) -> SoloGenerator:
        # The policy decides when an image is generated, not how.
        key = msgspec.structs.replace(config.engine, policy=EngineConfig().policy)
        if self._solo_generator is None or self._solo_generator[0] != key:
            self._solo_generator = key, SoloGenerator(self.spec, key)
        return self._solo_generator[1]

    def _save(self, run: BenchRun) -> None:
        if run.records or run.complete:
            self.runs.append(run)
            file = runs.write_run(run, self.folder)
            log_status(f"{run.target}: {run_line(run)}; wrote {file}")


def main(
    config: Config,
    folder: pathlib.Path,
    plans: Callable[[Config, DiffusionModelSpec], Iterable[RunPlan]],
    write_report: ReportWriter,
    *,
    quick: bool = False,
) -> int:
    """Make the runs that `plans` yields, then write the report of all of them; returns the exit status.

    `plans` is called with settings for servers that leave nothing behind; it may measure before it yields.

    Raises:
        NoriaError: the model cannot be opened, or the folder cannot be created.

    """
    spec = open_model_of(DiffusionModelSpec, config.model, config.engine)
    make_results_folder(folder)
    with sigterm_interrupts(), tempfile.TemporaryDirectory(prefix="noria-bench-") as cache:
        suite = Suite(isolated_config(config, cache), folder, spec, quick)
        try:
            status = run_to_end(lambda: suite.run_all(plans(suite.config, suite.spec)), log_status, suite.failures)
        finally:
            suite.end_server()
    if suite.runs:
        for file in write_report(folder, suite.runs):
            log_status(f"wrote {file}")
            if file.suffix == ".md":
                print(file.read_text(encoding="utf-8"))
    for failure in suite.failures:
        log_status(failure)
    return status


def warm_up(url: str, protocol: Protocol, bodies: Sequence[Body]) -> None:
    """Send each body once, eight at a time. Single errors are ignored: they recur under load, where they are counted.

    Raises:
        RuntimeError: every request failed.

    """

    def send(body: Body) -> str | None:
        try:
            answer = client.post(url, content=encode_request(protocol, body))
        except httpx.HTTPError as error:
            return repr(error)
        return None if answer.is_success else f"{answer.status_code} {answer.content[:_MAX_ERROR_BYTES]!r}"

    client = httpx.Client(headers={"content-type": "application/json"}, timeout=300, trust_env=False)
    with client, ThreadPoolExecutor(_NUM_WARM_UP_USERS) as users:
        errors = list(users.map(send, bodies))
    if errors and all(errors):
        raise RuntimeError(f"every request of the warm-up failed: {errors[0]}")


def run_line(run: BenchRun) -> str:
    """The outcome of a run as one line, for status messages."""
    seconds = run.duration_s or run.traffic.seconds
    num_failed = sum(record.status != 200 for record in run.records)
    num_done = sum(record.status == 200 and (record.done_s or 0.0) <= seconds for record in run.records)
    failed_checks = [check for check in run.image_checks if check.problem]
    parts = [f"{len(run.records)} requests", f"{num_done / seconds:.2f}/s", f"{num_failed} failed"]
    if any(record.deadline_s is not None for record in run.records):
        parts.append(f"{attainment(run.records):.2f} within their deadlines")
    parts.append(f"{len(failed_checks)} of {len(run.image_checks)} checked images are incorrect")
    parts += [f"request {check.number} {check.problem}" for check in failed_checks[:3]]
    return ", ".join(parts) + ("" if run.complete else "; incomplete")


def log_status(text: str) -> None:
    """Print a status message to stderr."""
    print(f"noria bench: {text}", file=sys.stderr, flush=True)
