"""`noria bench cost`: the cost of metrics, logs and an open page /live in throughput, and the duration of a scrape of
/metrics.

Two servers run side by side, one idle while the other works: an *instrumented* one, as users run it (metrics scraped
every 15 s, JSON logs at level info into a file, one client that reads /v1/live with thumbnails), and a *bare* one
without any of it (`no_metrics_server`, log level error). Both process the same mixed requests in runs of a few seconds,
in pairs whose order alternates (instrumented, bare, bare, instrumented), so that changes of the machine's speed affect
both equally. Both servers are restarted after some pairs, so that the variation between processes is not mistaken for a
cost. Then /metrics is scraped with 100 label sets, from servers without a model.

Ctrl-C, SIGTERM, or a server that fails, ends the bench with what was measured. Documented in docs/benchmarks/cost.md.
"""

import contextlib
import itertools
import math
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from noria.config import Config
from noria.models.catalog import open_model_of
from noria.protocol.diffusion import DiffusionModelSpec
from noria.testing.server import RunningServer, config_flags, running_process
from noria_bench.cost import summary
from noria_bench.cost.background_viewers import SCRAPE_INTERVAL_S, background_viewers, scrape
from noria_bench.cost.options import CostOptions
from noria_bench.cost.summary import CostRun, Pair
from noria_bench.cost.synthetic_metrics import SyntheticProcess
from noria_bench.load import closed_loop
from noria_bench.load.workload import RequestTemplate, mixed
from noria_bench.measurement.provenance import collect_provenance
from noria_bench.measurement.resource_monitor import monitor_resources
from noria_bench.running import run_to_end, status_log, write_json
from noria_bench.targets.server import isolated_config

_log_status = status_log("cost")
# Load before measuring each fresh server: samplers are compiled, and memory grows to what load needs.
_WARM_UP_S = 6.0
# Before both servers are restarted.
_PAIRS_PER_INCARNATION = 8
_NUM_SCRAPES = 40
# Front ends, engines and restarts of the servers whose /metrics is scraped.
_SCRAPED_SERVERS = ((1, 1, 0), (4, 2, 0), (1, 1, 200))


def main(config: Config, options: CostOptions, output: pathlib.Path | None = None) -> int:
    """Measure, print tables and write JSON to `output` after every pair; returns the exit status."""
    with tempfile.TemporaryDirectory(prefix="noria-bench-") as folder:
        bench = CostBench(config, options, pathlib.Path(folder), output)
        status = run_to_end(bench.measure, _log_status, bench.failures)
    print(summary.tables(bench.document()))
    return status


@dataclass
class CostBench:
    """The state of the bench: what has been measured so far."""

    config: Config
    options: CostOptions
    folder: pathlib.Path  # temporary, for logs and cached costs
    output: pathlib.Path | None
    pairs: list[Pair] = field(default_factory=list)
    scrapes: list[dict[str, Any]] = field(default_factory=list)
    complete: bool = False
    failures: list[str] = field(default_factory=list)
    # Seconds of load on the instrumented server since its last scrape.
    _since_scrape_s: float = math.inf

    def __post_init__(self) -> None:
        self._spec = open_model_of(DiffusionModelSpec, self.config.model, self.config.engine)
        self._templates = list(itertools.islice(mixed(self._spec).templates(self.options.seed), 4096))
        self._provenance = collect_provenance()

    def measure(self) -> None:
        """Measure all pairs, then all scrapes; saves after each."""
        for first in range(0, self.options.num_pairs, _PAIRS_PER_INCARNATION):
            bare_first = first // _PAIRS_PER_INCARNATION % 2 == 1
            with self._server(bare=bare_first) as first_server, self._server(bare=not bare_first) as second_server:
                servers = {bare_first: first_server, not bare_first: second_server}
                for number in range(first, min(first + _PAIRS_PER_INCARNATION, self.options.num_pairs)):
                    self.pairs.append(self._pair(number, servers))
                    _log_status(f"{number + 1} of {self.options.num_pairs}: {summary.pair_line(self.pairs[-1])}")
                    self._save()
        for counts in _SCRAPED_SERVERS:
            self.scrapes.append(measure_scrapes(*counts))
            self._save()
        self.complete = True
        self._save()

    def document(self) -> dict[str, Any]:
        """The results so far, JSON-ready."""
        spec = self._spec
        return {
            **self._provenance,
            "bench": "cost",
            "model": {"name": spec.name, "fingerprint": spec.fingerprint, "unet_parameters": spec.num_parameters},
            "options": asdict(self.options),
            "flags": config_flags(self.config),
            "complete": self.complete,
            "summary": summary.summarise(self.pairs),
            "scrapes": self.scrapes,
            "pairs": [msgspec.to_builtins(pair) for pair in self.pairs],
        }

    @contextlib.contextmanager
    def _server(self, *, bare: bool) -> Iterator[RunningServer]:
        """A fresh server, warmed up."""
        features = () if bare else self.options.features
        name = "bare" if bare else "instrumented"
        log, data = self.folder / f"{name}.log", self.folder / name
        flags = ["--log-level", "info", "--log-format", "json"] if "logs" in features else ["--log-level", "error"]
        config = isolated_config(self.config, str(self.folder))
        # The later flag wins.
        arguments = [config.model, *config_flags(config), "--data-dir", str(data), *flags]
        module = ["noria", "serve"] if "metrics" in features else ["noria_bench.cost.no_metrics_server"]

        def command(port: int) -> list[str]:
            return [sys.executable, "-m", *module, *arguments, "--port", str(port)]

        with running_process(command, log=log) as server:
            self._load(server, _WARM_UP_S, 0)
            yield server

    def _pair(self, number: int, servers: Mapping[bool, RunningServer]) -> Pair:
        """Send the same requests to both servers: the bare one is that of True."""
        bare_first = number % 2 == 1
        runs = {bare: self._run(number, servers[bare], bare=bare) for bare in (bare_first, not bare_first)}
        return Pair(number // _PAIRS_PER_INCARNATION, bare_first, runs[False], runs[True])

    def _run(self, number: int, server: RunningServer, *, bare: bool) -> CostRun:
        """Send the requests of pair `number` to one server.

        Raises:
            RuntimeError: a background client received nothing, or a request failed.

        """
        features, first = () if bare else self.options.features, number * self.options.num_requests
        scrapes = "metrics" in features and self._since_scrape_s >= SCRAPE_INTERVAL_S
        cpu_before = sum(server.cpu_s().values())
        with (
            background_viewers(server.port, live="live" in features, scrapes=scrapes) as viewers,
            monitor_resources(server, interval_s=1.0) as resources,
        ):
            started = time.monotonic()
            replies = self._load(server, math.inf, first, self.options.num_requests)
            seconds = time.monotonic() - started
            cpu_s = sum(server.cpu_s().values()) - cpu_before
        if viewers.fault or ("live" in features and not viewers.num_views):
            raise RuntimeError(viewers.fault or "GET /v1/live sent no view")
        if failed := [reply.status for reply in replies if reply.status != 200]:
            raise RuntimeError(f"{len(failed)} of {len(replies)} requests failed, with statuses {sorted(set(failed))}")
        if not bare:
            self._since_scrape_s = seconds if scrapes else self._since_scrape_s + seconds
        templates = [self._template(first + reply.number) for reply in replies]
        return CostRun(
            seconds=seconds,
            rows=sum(template.rows(self._spec) for template in templates),
            images=sum(template.n for template in templates),
            cpu_s=cpu_s,
            other_cpu_share=resources.other_cpu_share,
            views=viewers.num_views,
            scrapes_s=tuple(viewers.scrapes_s),
        )

    def _load(
        self, server: RunningServer, seconds: float, first: int, max_requests: int | None = None
    ) -> list[closed_loop.Reply]:
        def body(number: int) -> dict[str, Any]:
            return self._template(first + number).body | {"metadata": False}

        return closed_loop.run_closed_loop(
            server.port, self.options.num_users, seconds, body, max_requests=max_requests
        )

    def _template(self, number: int) -> RequestTemplate:
        return self._templates[number % len(self._templates)]

    def _save(self) -> None:
        if self.output is not None:
            write_json(self.document(), self.output)


def measure_scrapes(
    num_frontends: int, num_engines: int, num_restarts: int = 0, num_scrapes: int = _NUM_SCRAPES
) -> dict[str, Any]:
    """Seconds of scrapes of /metrics with 100 label sets, from a server with that many processes and no model."""

    def command(port: int) -> list[str]:
        process = SyntheticProcess(
            "supervisor", "supervisor", port, os.getpid(), num_frontends, num_engines, num_restarts
        )
        return [sys.executable, "-m", "noria_bench.cost.synthetic_metrics", msgspec.json.encode(process).decode()]

    with running_process(command, ready_path="/metrics") as server:
        scrapes_s, num_bytes = [], 0
        for _ in range(num_scrapes):
            seconds, num_bytes = scrape(server.port)
            scrapes_s.append(seconds)
    description = (
        f"{num_frontends} front end{'s' * (num_frontends > 1)} and {num_engines} engine{'s' * (num_engines > 1)}"
        + f", after {num_restarts} restarts" * (num_restarts > 0)
    )
    _log_status(f"/metrics of {description}: median {1000 * statistics.median(scrapes_s):.1f} ms")
    return {
        "description": description,
        "bytes": num_bytes,
        "best_s": min(scrapes_s),
        "median_s": statistics.median(scrapes_s),
        "worst_s": max(scrapes_s),
        "scrapes_s": scrapes_s,
    }
