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

from noria.bench import calibration, report, same_image
from noria.bench.machine import provenance
from noria.bench.needs import check_installed
from noria.bench.openloop import Job
from noria.bench.options import ContractOptions, Target
from noria.bench.report import Run
from noria.bench.server import RunningServer, apart, flags_of, running_server, running_target
from noria.bench.statistics import Record
from noria.bench.targets.catalog import TARGETS
from noria.bench.watching import watched
from noria.bench.workload import MIXES, Arrival, trace
from noria.config import Config
from noria.models.catalog import open_model
from noria.spec import ModelSpec

SEED = TARGETS["seed-batched"]
_SATURATED_S = 24.0  # of mixed traffic, to measure a capacity
_STEADY_S = 40.0  # of 8 users, to see how good predictions are
_WARM_UP_S = 4.0  # of mixed traffic before each run: samplers are compiled, memory is as large as load makes it


def main(
    config: Config,
    options: ContractOptions,
    output: pathlib.Path | None = None,
    plots: pathlib.Path | None = None,
) -> int:
    """Measure, print tables, write JSON to `output` after every run and plots into `plots`; returns the exit status.

    Raises:
        ConfigError: what it needs is not installed.

    """
    check_installed("fastapi", "httpx", *(["matplotlib"] if plots is not None else []))
    with tempfile.TemporaryDirectory(prefix="noria-bench-") as folder:
        bench = ContractBench(apart(config, folder), options, output)
        status = _measured(bench)
    document = bench.document()
    if bench.runs:
        print(report.tables(document))
    if plots is not None and bench.runs:
        from noria.bench.plots import draw

        for file in draw(bench.runs, plots):
            _say(f"wrote {file}")
    return status


def _measured(bench: "ContractBench") -> int:
    """Measure as far as it goes; returns the exit status."""
    try:
        bench.measure()
    except KeyboardInterrupt:
        _say("interrupted; what follows is what was measured until now")
        return 130
    except (RuntimeError, OSError) as error:
        _say(f"stopped: {error}; what follows is what was measured until now")
        return 1
    return 0


@dataclass
class ContractBench:
    """One bench, as far as it has come."""

    config: Config
    options: ContractOptions
    output: pathlib.Path | None
    runs: list[Run] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)  # all but the runs
    complete: bool = False

    def measure(self) -> None:
        """Everything, in order; what is found is kept as it comes."""
        options, spec = self.options, open_model(self.config.model)
        self.about = {
            **provenance(),
            "bench": "contract",
            "model": {"name": spec.name, "fingerprint": spec.fingerprint, "unet_parameters": spec.num_parameters},
            "options": asdict(options),
        }
        costs = self._calibrate(spec)
        rows_per_s = self.about["capacity"]["noria"]["rows_per_s"]
        plan = [(load, target) for load in options.loads for target in options.targets]
        started = time.monotonic()
        for done, (load, target) in enumerate(plan):
            arrivals = trace(
                MIXES[options.mix](spec),
                spec,
                lambda ask: calibration.solo_s(costs, ask),
                rows_per_s=rows_per_s * load / 100,
                seconds=options.seconds,
                arrivals=options.arrivals,
                seed=options.seed,
            )
            self.runs.append(self._run(spec, target, load, arrivals))
            left_s = (time.monotonic() - started) / (done + 1) * (len(plan) - done - 1)
            _say(f"{done + 1} of {len(plan)}: {report.line(self.runs[-1])}; about {left_s / 60:.0f} min left")
            self._save()
        self.complete = True
        self._save()

    def document(self) -> dict[str, Any]:
        """All that is known, ready for JSON."""
        return {
            **self.about,
            "complete": self.complete,
            "summary": report.summarise(self.runs, self.about.get("same_image", {})),
            "record_fields": Record.__struct_fields__,
            "runs": report.for_json([msgspec.to_builtins(run) for run in self.runs]),
        }

    def _calibrate(self, spec: ModelSpec) -> tuple[calibration.SoloCost, ...]:
        mix, seed = MIXES[self.options.mix](spec), self.options.seed
        capacity: dict[str, Any] = {}
        with self._server(spec, "least-slack") as (server, path):
            url = f"http://127.0.0.1:{server.port}{path}"
            _say("measuring what requests take alone")
            costs = calibration.measure_solo(url, mix, spec)
            _say("measuring Noria's capacity")
            capacity["noria"] = _saturated(server, path, spec, mix, seed)
            _say("measuring predictions at a steady load")
            errors = calibration.steady_errors(server.port, path, mix, _STEADY_S, seed + 2)
            found = {"as it is": same_image.differences(url, spec)}
        _say("drawing the same seeds alone and in a crowd")
        with self._server(spec, "least-slack", "--buckets", str(2 * same_image.IN_FLIGHT)) as (server, path):
            found["one bucket"] = same_image.differences(f"http://127.0.0.1:{server.port}{path}", spec)
        if "seed" in self.options.targets:
            _say("measuring the seed's capacity")
            with self._server(spec, "seed") as (server, path):
                capacity["seed"] = _saturated(server, path, spec, mix, seed)
        self.about |= {
            "solo": [msgspec.to_builtins(cost) for cost in costs],
            "capacity": capacity,
            "same_image": found,
            "steady": report.of_errors(errors),
        }
        return costs

    @contextlib.contextmanager
    def _server(self, spec: ModelSpec, target: Target, *flags: str) -> Iterator[tuple[RunningServer, str]]:
        """A fresh server, and the path that it draws on."""
        if target == "seed":
            with running_target(SEED, spec, self.config) as server:
                yield server, SEED.path
        else:
            with running_server(
                [self.config.model, *flags_of(self.config), "--policy", target, *flags]
            ) as server:  # the later flag wins
                yield server, "/t2i"

    def _run(self, spec: ModelSpec, target: Target, load: int, arrivals: tuple[Arrival, ...]) -> Run:
        mix = MIXES[self.options.mix](spec)
        with self._server(spec, target) as (server, path):
            calibration.saturate(server.port, path, mix, spec, _WARM_UP_S, self.options.seed + 1)
            with watched(server) as seen:
                records = _sent(Job(f"http://127.0.0.1:{server.port}{path}", arrivals))
        return Run(target, load, self.options.seconds, tuple(records), tuple(seen.memory), seen.others_share)

    def _save(self) -> None:
        """Write the document whole, or leave the old one."""
        if self.output is None:
            return
        new = self.output.with_name(self.output.name + ".new")
        new.write_text(json.dumps(self.document(), allow_nan=False) + "\n", encoding="utf-8")
        new.replace(self.output)


def _saturated(server: RunningServer, path: str, spec: ModelSpec, mix: Any, seed: int) -> dict[str, Any]:
    found = calibration.saturate(server.port, path, mix, spec, _SATURATED_S, seed)
    return msgspec.to_builtins(found)  # type: ignore[no-any-return]


def _sent(job: Job) -> list[Record]:
    """The fate of every request of `job`, sent by a process of its own, which a terminal's Ctrl-C does not reach."""
    command = [sys.executable, "-m", "noria.bench.openloop"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0) as client:
        try:
            assert client.stdin is not None and client.stdout is not None
            client.stdin.write(msgspec.json.encode(job))
            client.stdin.close()
            records = [msgspec.json.decode(line, type=Record) for line in client.stdout]
        finally:
            client.terminate()
    if len(records) != len(job.arrivals):
        raise RuntimeError(f"the client ended after {len(records)} of {len(job.arrivals)} requests")
    return sorted(records, key=lambda record: record.number)


def _say(text: str) -> None:
    print(f"noria bench contract: {text}", file=sys.stderr, flush=True)
