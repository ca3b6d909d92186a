"""`noria bench cost`: what metrics, logs and an open page /live take of a server's throughput, and how long /metrics takes to answer.

Two servers run side by side, one idle while the other works: *watched*, as its users run it (metrics scraped every 15 s, JSON logs at level
info into a file, one client that reads /v1/live with pictures), and *bare*, with none of it (`silent.py`, log level error). Both draw the
same mixed requests in runs of a few seconds, in pairs whose order alternates (watched, bare, bare, watched), so that a machine which is
now faster, now slower is so for both. After some pairs both are started anew: no luck of one process is taken for a cost. Then `/metrics`
is asked for at 100 label sets, of servers without a model.

Ctrl-C, SIGTERM, or a server that fails, ends the bench with what was measured until then. Reading the answer: docs/benchmarks/cost.md.
"""

import contextlib
import itertools
import json
import math
import os
import pathlib
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

import msgspec

from noria.bench import cost_report, load
from noria.bench.cost_options import CostOptions
from noria.bench.cost_report import CostRun, Pair
from noria.bench.counted import Counted
from noria.bench.machine import provenance
from noria.bench.onlookers import SCRAPE_EVERY_S, onlookers, scrape
from noria.bench.server import RunningServer, apart, flags_of, running_process
from noria.bench.watching import watched
from noria.bench.workload import Ask, mixed
from noria.config import Config
from noria.models.catalog import open_model
from noria.observe.process import sigterm_interrupts

_WARM_UP_S = 6.0  # of each fresh server: samplers are compiled, memory is as large as load makes it
_PAIRS_A_LIFE = 8  # before both servers are started anew
_NUM_SCRAPES = 40
_SERVERS = ((1, 1, 0), (4, 2, 0), (1, 1, 200))  # front ends, engines and restarts of those whose /metrics is asked for


def main(config: Config, options: CostOptions, output: pathlib.Path | None = None) -> int:
    """Measure, print tables, write JSON to `output` after every pair; returns the exit status."""
    with tempfile.TemporaryDirectory(prefix="noria-bench-") as folder:
        bench = CostBench(config, options, pathlib.Path(folder), output)
        status = _measured(bench)
    print(cost_report.tables(bench.document()))
    return status


def _measured(bench: "CostBench") -> int:
    """Measure as far as it goes; returns the exit status."""
    try:
        with sigterm_interrupts():
            bench.measure()
    except KeyboardInterrupt:
        _say("interrupted; what follows is what was measured until now")
        return 130
    except (RuntimeError, OSError) as error:
        _say(f"stopped: {error}; what follows is what was measured until now")
        return 1
    return 0


@dataclass
class CostBench:
    """One bench, as far as it has come."""

    config: Config
    options: CostOptions
    folder: pathlib.Path  # for logs and costs, gone with the bench
    output: pathlib.Path | None
    pairs: list[Pair] = field(default_factory=list)
    scrapes: list[dict[str, Any]] = field(default_factory=list)
    complete: bool = False
    _unscraped_s: float = math.inf  # that the watched server has worked since it was scraped

    def __post_init__(self) -> None:
        self._spec = open_model(self.config.model)
        self._asks = list(itertools.islice(mixed(self._spec).asks(self.options.seed), 4096))
        self._about = provenance()

    def measure(self) -> None:
        """Everything, in order; what is found is kept as it comes."""
        for first in range(0, self.options.pairs, _PAIRS_A_LIFE):
            bare_first = first // _PAIRS_A_LIFE % 2 == 1
            with self._server(bare=bare_first) as one, self._server(bare=not bare_first) as other:
                watched_server, bare_server = (other, one) if bare_first else (one, other)
                for number in range(first, min(first + _PAIRS_A_LIFE, self.options.pairs)):
                    self.pairs.append(self._pair(number, watched_server, bare_server))
                    _say(f"{number + 1} of {self.options.pairs}: {cost_report.line(self.pairs[-1])}")
                    self._save()
        for counts in _SERVERS:
            self.scrapes.append(measure_scrapes(*counts))
            self._save()
        self.complete = True
        self._save()

    def document(self) -> dict[str, Any]:
        """All that is known, ready for JSON."""
        spec = self._spec
        return {
            **self._about,
            "bench": "cost",
            "model": {"name": spec.name, "fingerprint": spec.fingerprint, "unet_parameters": spec.num_parameters},
            "options": asdict(self.options),
            "flags": flags_of(self.config),
            "complete": self.complete,
            "summary": cost_report.summarise(self.pairs),
            "scrapes": self.scrapes,
            "pairs": [msgspec.to_builtins(pair) for pair in self.pairs],
        }

    @contextlib.contextmanager
    def _server(self, *, bare: bool) -> Iterator[RunningServer]:
        """A fresh server that is warm."""
        parts = () if bare else self.options.parts
        log, data = self.folder / ("bare.log" if bare else "watched.log"), self.folder / ("bare" if bare else "watched")
        flags = ["--log-level", "info", "--log-format", "json"] if "logs" in parts else ["--log-level", "error"]
        config = apart(self.config, str(self.folder))
        arguments = [config.model, *flags_of(config), "--data-dir", str(data), *flags]  # the later flag wins
        module = ["noria", "serve"] if "metrics" in parts else ["noria.bench.silent"]

        def command(port: int) -> list[str]:
            return [sys.executable, "-m", *module, *arguments, "--port", str(port)]

        with running_process(command, log=log) as server:
            self._load(server, _WARM_UP_S, 0)
            yield server

    def _pair(self, number: int, watched_server: RunningServer, bare_server: RunningServer) -> Pair:
        life, bare_first = number // _PAIRS_A_LIFE, number % 2 == 1
        if bare_first:
            bare = self._run(number, bare_server, bare=True)
            return Pair(life, bare_first, self._run(number, watched_server, bare=False), bare)
        watched_run = self._run(number, watched_server, bare=False)
        return Pair(life, bare_first, watched_run, self._run(number, bare_server, bare=True))

    def _run(self, number: int, server: RunningServer, *, bare: bool) -> CostRun:
        """The requests of pair `number`, by one server, with or without its onlookers. Raises RuntimeError where they saw nothing, or not all was drawn."""
        parts, first = () if bare else self.options.parts, number * self.options.requests
        scrapes = "metrics" in parts and self._unscraped_s >= SCRAPE_EVERY_S
        lines_before, cpu_before = self._log_lines(), sum(server.cpu_s().values())
        with onlookers(server.port, live="live" in parts, scrapes=scrapes) as seen, watched(server, every_s=1.0) as use:
            started = time.monotonic()
            replies = self._load(server, math.inf, first, self.options.requests)
            seconds = time.monotonic() - started
            cpu_s = sum(server.cpu_s().values()) - cpu_before
        if seen.fault or ("live" in parts and not seen.views):
            raise RuntimeError(seen.fault or "GET /v1/live showed no wheel")
        if failed := [reply.status for reply in replies if reply.status != 200]:
            raise RuntimeError(
                f"{len(failed)} of {len(replies)} requests were not drawn: answers were {sorted(set(failed))}"
            )
        if not bare:
            self._unscraped_s = seconds if scrapes else self._unscraped_s + seconds
        drawn = [self._ask(first + reply.number) for reply in replies]
        return CostRun(
            seconds=seconds,
            rows=sum(ask.rows(self._spec) for ask in drawn),
            images=sum(ask.n for ask in drawn),
            cpu_s=cpu_s,
            others_share=use.others_share,
            views=seen.views,
            live_bytes=seen.live_bytes,
            scrapes_s=tuple(seen.scrapes_s),
            log_lines=0 if bare else self._log_lines() - lines_before,
        )

    def _load(self, server: RunningServer, seconds: float, first: int, most: int | None = None) -> list[load.Reply]:
        def body(number: int) -> dict[str, Any]:
            fields: dict[str, Any] = msgspec.to_builtins(self._ask(first + number))
            return fields | {"metadata": False}

        return load.closed_loop(server.port, self.options.users, seconds, body, most=most)

    def _ask(self, number: int) -> Ask:
        return self._asks[number % len(self._asks)]

    def _log_lines(self) -> int:
        log = self.folder / "watched.log"
        return log.read_bytes().count(b"\n") if log.exists() else 0

    def _save(self) -> None:
        """Write the document whole, or leave the old one."""
        if self.output is None:
            return
        new = self.output.with_name(self.output.name + ".new")
        new.write_text(json.dumps(self.document(), indent=1, allow_nan=False) + "\n", encoding="utf-8")
        new.replace(self.output)


def measure_scrapes(
    num_frontends: int, num_engines: int, num_restarts: int = 0, num: int = _NUM_SCRAPES
) -> dict[str, Any]:
    """How long /metrics takes at 100 label sets, of a server of so many processes that do nothing else; seconds."""

    def command(port: int) -> list[str]:
        task = Counted("supervisor", "supervisor", port, os.getpid(), num_frontends, num_engines, num_restarts)
        return [sys.executable, "-m", "noria.bench.counted", msgspec.json.encode(task).decode()]

    with running_process(command, ready_path="/metrics") as server:
        took_s, num_bytes = [], 0
        for _ in range(num):
            seconds, num_bytes = scrape(server.port)
            took_s.append(seconds)
    processes = (
        f"{num_frontends} front end{'s' * (num_frontends > 1)} and {num_engines} engine{'s' * (num_engines > 1)}"
        + f", after {num_restarts} restarts" * (num_restarts > 0)
    )
    _say(f"/metrics of {processes}: median {1000 * statistics.median(took_s):.1f} ms")
    return {
        "words": processes,
        "bytes": num_bytes,
        "best_s": min(took_s),
        "median_s": statistics.median(took_s),
        "worst_s": max(took_s),
        "scrapes_s": took_s,
    }


def _say(text: str) -> None:
    print(f"noria bench cost: {text}", file=sys.stderr, flush=True)
