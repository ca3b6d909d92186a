"""`noria bench contract`: who gets his image in time, at 50 to 150 % of capacity, by Noria's policies and by the seed's microbatching.

First Noria is calibrated: what each kind of request takes alone (deadlines are multiples of it), and how much mixed work it sustains
(loads are shares of it, the seed's too). Then every load is sent to every target: the same trace, a fresh server each time, all
targets of one load one after the other, so that a noisy machine troubles them alike. Reading the answer: docs/benchmarks/contract.md.

Ctrl-C, or a server that fails, ends the bench with what was measured until then. Needs the extra `bench`.
"""

import contextlib
import json
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from noria.config import Config
from noria.models.catalog import open_model
from noria.protocol.model_spec import ModelSpec
from noria_bench.benches.deadline_options import DeadlineOptions, DeadlineTarget
from noria_bench.load import capacity as calibration
from noria_bench.load.open_loop import OpenLoopConfig
from noria_bench.load.workload import MIXES, Arrival, generate_trace
from noria_bench.measurement import batch_invariance
from noria_bench.measurement.provenance import collect_provenance
from noria_bench.measurement.resource_monitor import monitor_resources
from noria_bench.measurement.run_metrics import RequestRecord
from noria_bench.preflight import check_installed
from noria_bench.reports import deadlines_report
from noria_bench.reports.deadlines_report import DeadlineRun
from noria_bench.targets.catalog import TARGETS
from noria_bench.targets.server import RunningServer, config_flags, isolated_config, running_server, running_target

REFERENCE = TARGETS["seed-batched"]
_CAPACITY_S = 24.0  # of mixed traffic, to measure a capacity
_STEADY_S = 40.0  # of 8 users, to see how good predictions are
_WARM_UP_S = 4.0  # of mixed traffic before each run: samplers are compiled, memory is as large as load makes it


def main(
    config: Config,
    options: DeadlineOptions,
    output: pathlib.Path | None = None,
    plots: pathlib.Path | None = None,
) -> int:
    """Measure, print tables, write JSON to `output` after every run and plots into `plots`; returns the exit status.

    Raises:
        ConfigError: what it needs is not installed.

    """
    check_installed("fastapi", "httpx", *(["matplotlib"] if plots is not None else []))
    with tempfile.TemporaryDirectory(prefix="noria-bench-") as folder:
        bench = DeadlineBench(isolated_config(config, folder), options, output)
        status = _run_to_end(bench)
    document = bench.document()
    if bench.runs:
        print(deadlines_report.tables(document))
    if plots is not None and bench.runs:
        from noria_bench.reports.plots.deadlines_plots import plot_runs

        for file in plot_runs(bench.runs, plots):
            _log_status(f"wrote {file}")
    return status


def _run_to_end(bench: "DeadlineBench") -> int:
    """Measure as far as it goes; returns the exit status."""
    try:
        bench.measure()
    except KeyboardInterrupt:
        _log_status("interrupted; what follows is what was measured until now")
        return 130
    except (RuntimeError, OSError) as error:
        _log_status(f"stopped: {error}; what follows is what was measured until now")
        return 1
    return 0


@dataclass
class DeadlineBench:
    """One bench, as far as it has come."""

    config: Config
    options: DeadlineOptions
    output: pathlib.Path | None
    runs: list[DeadlineRun] = field(default_factory=list)
    header: dict[str, Any] = field(default_factory=dict)  # all but the runs
    complete: bool = False

    def measure(self) -> None:
        """Everything, in order; what is found is kept as it comes."""
        options, spec = self.options, open_model(self.config.model)
        self.header = {
            **collect_provenance(),
            "bench": "contract",
            "model": {"name": spec.name, "fingerprint": spec.fingerprint, "unet_parameters": spec.num_parameters},
            "options": asdict(options),
        }
        solo_costs = self._calibrate(spec)
        rows_per_s = self.header["capacity"]["noria"]["rows_per_s"]
        plan = [(load, target) for load in options.loads for target in options.targets]
        started = time.monotonic()
        for num_done, (load, target) in enumerate(plan):
            arrivals = generate_trace(
                MIXES[options.mix](spec),
                spec,
                lambda ask: calibration.solo_s(solo_costs, ask),
                rows_per_s=rows_per_s * load / 100,
                seconds=options.seconds,
                arrivals=options.arrivals,
                seed=options.seed,
            )
            self.runs.append(self._run(spec, target, load, arrivals))
            remaining_s = (time.monotonic() - started) / (num_done + 1) * (len(plan) - num_done - 1)
            _log_status(
                f"{num_done + 1} of {len(plan)}: {deadlines_report.run_line(self.runs[-1])}; about {remaining_s / 60:.0f} min left"
            )
            self._save()
        self.complete = True
        self._save()

    def document(self) -> dict[str, Any]:
        """All that is known, ready for JSON."""
        return {
            **self.header,
            "complete": self.complete,
            "summary": deadlines_report.summarise(self.runs, self.header.get("same_image", {})),
            "record_fields": RequestRecord.__struct_fields__,
            "runs": deadlines_report.finite_json([msgspec.to_builtins(run) for run in self.runs]),
        }

    def _calibrate(self, spec: ModelSpec) -> tuple[calibration.SoloCost, ...]:
        mix, seed = MIXES[self.options.mix](spec), self.options.seed
        capacity: dict[str, Any] = {}
        with self._server(spec, "least-slack") as (server, path):
            url = f"http://127.0.0.1:{server.port}{path}"
            _log_status("measuring what requests take alone")
            costs = calibration.measure_solo(url, mix, spec)
            _log_status("measuring Noria's capacity")
            capacity["noria"] = _measured_capacity(server, path, spec, mix, seed)
            _log_status("measuring predictions at a steady load")
            errors = calibration.measure_prediction_errors(server.port, path, mix, _STEADY_S, seed + 2)
            differences = {"as it is": batch_invariance.max_channel_differences(url, spec)}
        _log_status("drawing the same seeds alone and in a crowd")
        with self._server(spec, "least-slack", "--buckets", str(2 * batch_invariance.IN_FLIGHT)) as (server, path):
            differences["one bucket"] = batch_invariance.max_channel_differences(
                f"http://127.0.0.1:{server.port}{path}", spec
            )
        if "seed" in self.options.targets:
            _log_status("measuring the seed's capacity")
            with self._server(spec, "seed") as (server, path):
                capacity["seed"] = _measured_capacity(server, path, spec, mix, seed)
        self.header |= {
            "solo": [msgspec.to_builtins(cost) for cost in costs],
            "capacity": capacity,
            "same_image": differences,
            "steady": deadlines_report.summarise_errors(errors),
        }
        return costs

    @contextlib.contextmanager
    def _server(self, spec: ModelSpec, target: DeadlineTarget, *flags: str) -> Iterator[tuple[RunningServer, str]]:
        """A fresh server, and the path that it draws on."""
        if target == "seed":
            with running_target(REFERENCE, spec, self.config) as server:
                yield server, REFERENCE.path
        else:
            with running_server(
                [self.config.model, *config_flags(self.config), "--policy", target, *flags]
            ) as server:  # the later flag wins
                yield server, "/t2i"

    def _run(self, spec: ModelSpec, target: DeadlineTarget, load: int, arrivals: tuple[Arrival, ...]) -> DeadlineRun:
        mix = MIXES[self.options.mix](spec)
        with self._server(spec, target) as (server, path):
            calibration.measure_capacity(server.port, path, mix, spec, _WARM_UP_S, self.options.seed + 1)
            with monitor_resources(server) as resources:
                records = _send_open_loop(OpenLoopConfig(f"http://127.0.0.1:{server.port}{path}", arrivals))
        return DeadlineRun(
            target, load, self.options.seconds, tuple(records), tuple(resources.memory), resources.other_cpu_share
        )

    def _save(self) -> None:
        """Write the document whole, or leave the old one."""
        if self.output is None:
            return
        partial = self.output.with_name(self.output.name + ".new")
        partial.write_text(json.dumps(self.document(), allow_nan=False) + "\n", encoding="utf-8")
        partial.replace(self.output)


def _measured_capacity(server: RunningServer, path: str, spec: ModelSpec, mix: Any, seed: int) -> dict[str, Any]:
    found = calibration.measure_capacity(server.port, path, mix, spec, _CAPACITY_S, seed)
    return msgspec.to_builtins(found)  # type: ignore[no-any-return]


def _send_open_loop(config: OpenLoopConfig) -> list[RequestRecord]:
    """The fate of every request of `job`, sent by a process of its own, which a terminal's Ctrl-C does not reach."""
    command = [sys.executable, "-m", "noria_bench.load.open_loop"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0) as client:
        try:
            assert client.stdin is not None and client.stdout is not None
            client.stdin.write(msgspec.json.encode(config))
            client.stdin.close()
            records = [msgspec.json.decode(line, type=RequestRecord) for line in client.stdout]
        finally:
            client.terminate()
    if len(records) != len(config.arrivals):
        raise RuntimeError(f"the client ended after {len(records)} of {len(config.arrivals)} requests")
    return sorted(records, key=lambda record: record.number)


def _log_status(text: str) -> None:
    print(f"noria bench contract: {text}", file=sys.stderr, flush=True)
