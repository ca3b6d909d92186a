"""Measures one target once: starts it as a fresh server, warms it up, loads it.

The warm-up's answers are all compared; then come closed loops of each corpus, then open loops, whose rates are shares
of the raw loop's.
"""

import os
import pathlib
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from noria.config import Config
from noria.folders import cache_folder
from noria.models.encoder.onnx_export import find_or_export
from noria.protocol.text import EncoderModelSpec
from noria.testing.server import NO_PROXY_OPENER, RunningServer, config_flags, running_process, running_server
from noria_bench.encoders import load_tools
from noria_bench.encoders.catalog import INTERFACES, EncoderTarget
from noria_bench.encoders.client import ClientConfig, ClientResult
from noria_bench.encoders.corpus import FIXED_TEXT, mixed_texts
from noria_bench.encoders.measurements import make_measurement, sum_series
from noria_bench.encoders.options import Corpus, EncodersOptions
from noria_bench.encoders.results import Load, Measurement, TargetRun
from noria_bench.encoders.servers.job import EncoderFiles, EncoderJob, ServerSettings
from noria_bench.encoders.servers.onnx_encoder import read_counters
from noria_bench.encoders.servers.raw_loop import RawJob, RawResult
from noria_bench.measurement.resource_monitor import monitor_resources
from noria_bench.running import run_module, status_log
from noria_bench.targets import environments

WARM_UP_CONNECTIONS = 16
# Texts whose right vectors are known, which the warm-up sends.
_NUM_CHECKED = 256
_TO_JSON = msgspec.json.encode
_log_status = status_log("encoders")


@dataclass
class TargetRunner:
    """Runs targets, one at a time."""

    config: Config
    options: EncodersOptions
    spec: EncoderModelSpec
    threads: int  # of each server
    folder: pathlib.Path  # of the results
    work: pathlib.Path  # temporary
    raw_texts_per_s: float = 0.0  # of the raw loop; 0 until `prepare`

    def __post_init__(self) -> None:
        self.texts: dict[Corpus, list[str]] = {"fixed": [FIXED_TEXT], "mixed": mixed_texts(self.options.seed)}

    def prepare(self) -> None:
        """Export the model if that was not done, compute what is right, measure the raw loop."""
        os.environ.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")  # as Noria's servers have it
        graph = find_or_export(self.spec, cache_folder(self.config.engine.cache_dir, os.environ))
        counters = self.work / "counters"
        counters.mkdir()
        self._files = EncoderFiles(
            onnx=str(graph.file),
            tokenizer=str(self.spec.path / "tokenizer.json"),
            max_tokens=self.spec.max_length,
            inputs=graph.record.inputs,
            output=graph.record.output,
            normalize=self.spec.normalize,
            counter_folder=str(counters),
        )
        for corpus, texts in self.texts.items():
            job = RawJob(self.spec, self.config.engine, tuple(texts[:_NUM_CHECKED]), vectors=str(self._vectors(corpus)))
            run_module("noria_bench.encoders.servers.raw_loop", job)
        raw = self._raw_loop("mixed", "float32")
        self.raw_texts_per_s = raw.num_texts / raw.seconds

    def raw_run(self, target: EncoderTarget, number: int) -> TargetRun:
        """Measure the raw loop once with each corpus."""
        measurements = []
        for corpus in self.options.corpora:
            raw = self._raw_loop(corpus, target.precision)
            measurements.append(
                Measurement(
                    load=Load(corpus, "closed", "none"),
                    requests_per_s=raw.num_texts / raw.seconds,
                    num_ok=raw.num_texts,
                    num_failed=0,
                    cpu_s=raw.cpu_s,
                    mean_batch=raw.num_texts / raw.num_batches,
                    padding=1 - raw.num_tokens / raw.num_padded_tokens,
                )
            )
            _log_status(f"round {number + 1}: {target.name}: {corpus}: {measurements[-1].requests_per_s:.1f} texts/s")
        return TargetRun(target.name, number, {}, measurements)

    def _raw_loop(self, corpus: Corpus, precision: str) -> RawResult:
        """Run the raw loop once."""
        engine = msgspec.structs.replace(self.config.engine, encoder_precision=precision)
        job = RawJob(
            self.spec, engine, tuple(self.texts[corpus] * (8 if corpus == "fixed" else 1)), self.options.seconds
        )
        return msgspec.json.decode(run_module("noria_bench.encoders.servers.raw_loop", job), type=RawResult)

    def server_run(self, target: EncoderTarget, settings: ServerSettings, number: int) -> TargetRun:
        """Measure a target once."""
        framework = INTERFACES[target.kind].framework
        own_settings = {} if target.kind == "noria" else msgspec.to_builtins(settings)
        _log_status(f"round {number + 1}: {target.name}: starting")
        with self.server(target, settings) as server:
            found = self.client(target, server, "mixed", connections=WARM_UP_CONNECTIONS, num_requests=_NUM_CHECKED)
            load = Load("mixed", "closed", "own", WARM_UP_CONNECTIONS)
            check = make_measurement(load, found, target.precision)
            measurements = [self._measure(target, server, load, number) for load in self._loads()]
        return TargetRun(
            target=target.name,
            round=number,
            settings=own_settings,
            measurements=measurements,
            seconds_to_ready=server.seconds_to_ready,
            check=check,
            framework_versions={} if framework is None else environments.versions_of(framework),
        )

    @contextmanager
    def server(self, target: EncoderTarget, settings: ServerSettings) -> Iterator[RunningServer]:
        """A fresh server for `target`."""
        if target.kind == "noria":
            with running_server([self.config.model, *config_flags(self._engine_config(target))]) as server:
                yield server
            return
        interface = INTERFACES[target.kind]
        # Triton's is started by Noria's Python.
        is_other = interface.framework is not None and target.kind != "triton"
        python = str(environments.python_of(str(interface.framework))) if is_other else sys.executable

        def command(port: int) -> list[str]:
            job = EncoderJob(self._files, port, self.threads, self.spec.dimensions, settings, os.getpid())
            return [python, "-m", interface.module, _TO_JSON(job).decode()]

        log = self.folder / "logs" / f"{target.name}.log"
        log.parent.mkdir(exist_ok=True)
        with running_process(command, log=log, ready_path=interface.ready_path) as server:
            yield server

    def _engine_config(self, target: EncoderTarget) -> Config:
        engine = msgspec.structs.replace(self.config.engine, encoder_precision=target.precision)
        return msgspec.structs.replace(self.config, engine=engine)

    def _loads(self) -> list[Load]:
        """All loads of a server: closed loops, wrk's at the most connections, and open loops."""
        options = self.options
        fixed, mixed = "ab" if load_tools.has("ab") else "own", "own"
        loads = [
            Load(corpus, "closed", fixed if corpus == "fixed" else mixed, connections)  # type: ignore[arg-type]
            for corpus in options.corpora
            for connections in options.connections
        ]
        if "mixed" in options.corpora:
            if load_tools.has("wrk"):
                loads.append(Load("mixed", "closed", "wrk", max(options.connections)))
            loads += [
                Load("mixed", "open", "own", percent=percent, rate=self.raw_texts_per_s * percent / 100)
                for percent in options.load_percents
            ]
        return loads

    def _measure(self, target: EncoderTarget, server: RunningServer, load: Load, number: int) -> Measurement:
        """One load, with the CPU time and the batches of the server meanwhile."""
        seconds = self.options.seconds
        cpu_s, batches = sum(server.cpu_s().values()), self._batches(target, server)
        with monitor_resources(server, interval_s=1.0) as resources:
            if load.client == "own":
                measurement = make_measurement(load, self._own_load(target, server, load, number), target.precision)
            else:
                measurement = self._tool_load(target, server, load, number)
                self._wait_until_idle(target, server)
        new = [after - before for before, after in zip(batches, self._batches(target, server), strict=True)]
        measurement = msgspec.structs.replace(
            measurement,
            cpu_s=sum(server.cpu_s().values()) - cpu_s,
            other_cpu_share=resources.other_cpu_share,
            mean_batch=new[1] / new[0] if new[0] else None,
            padding=1 - new[2] / new[3] if new[3] else None,
        )
        where = f"{load.connections} connections" if load.loop == "closed" else f"{load.rate:.0f}/s"
        _log_status(
            f"round {number + 1}: {target.name}: {load.corpus}, {where}, {load.client}, {seconds:.0f} s: "
            f"{measurement.requests_per_s:.1f} requests/s, {measurement.num_failed} failed, "
            f"{measurement.num_wrong} wrong"
        )
        return measurement

    def _own_load(self, target: EncoderTarget, server: RunningServer, load: Load, number: int) -> ClientResult:
        # Every target gets the same texts in the same order; each round others.
        first = 997 * number
        if load.loop == "closed":
            return self.client(
                target,
                server,
                load.corpus,
                connections=load.connections or 1,
                seconds=self.options.seconds,
                first=first,
            )
        rng, rate, now_s = random.Random(f"{self.options.seed} {number} {load.percent}"), load.rate or 1.0, 0.0
        arrivals = list[tuple[float, int]]()
        while (now_s := now_s + rng.expovariate(rate)) < self.options.seconds:
            arrivals.append((now_s, rng.randrange(len(self.texts[load.corpus]))))
        return self.client(
            target, server, load.corpus, seconds=self.options.seconds, arrivals=tuple(arrivals or [(0.0, 0)])
        )

    def _tool_load(self, target: EncoderTarget, server: RunningServer, load: Load, number: int) -> Measurement:
        """A load by ab or wrk."""
        interface = INTERFACES[target.kind]
        url = f"http://127.0.0.1:{server.port}{interface.path}"
        bodies = self.work / f"{target.kind}-{load.corpus}.jsonl"
        bodies.write_bytes(b"\n".join(_TO_JSON(interface.body(text)) for text in self.texts[load.corpus]))
        folder = self.folder / load.client
        folder.mkdir(exist_ok=True)
        output = folder / f"{target.name}-{load.connections}-connections-round-{number + 1}.txt"
        if load.client == "ab":
            return load_tools.run_ab(url, bodies, load, self.options.seconds, output)
        return load_tools.run_wrk(url, bodies, 997 * number, load, self.options.seconds, output)

    def _wait_until_idle(self, target: EncoderTarget, server: RunningServer) -> None:
        """Wait for the requests that ab or wrk left behind: a later one is answered after them."""
        for _ in range(2):
            self.client(target, server, "fixed", connections=self.threads, num_requests=self.threads)

    def client(
        self, target: EncoderTarget, server: RunningServer, corpus: Corpus, *, seconds: float = 600.0,
        connections: int = 0, num_requests: int | None = None, first: int = 0,
        arrivals: tuple[tuple[float, int], ...] = (),
    ) -> ClientResult:  # fmt: skip
        """Run the bench's own client. Raises RuntimeError if it fails."""
        assert target.kind != "raw"
        config = ClientConfig(
            port=server.port,
            kind=target.kind,
            texts=tuple(self.texts[corpus]),
            vectors=str(self._vectors(corpus)),
            connections=connections,
            seconds=seconds,
            first=first,
            num_requests=num_requests,
            arrivals=arrivals,
        )
        return msgspec.json.decode(run_module("noria_bench.encoders.client", config), type=ClientResult)

    def _batches(self, target: EncoderTarget, server: RunningServer) -> Sequence[float]:
        """Batches, texts, tokens and tokens with padding, since the start; Noria's by its metrics."""
        if target.kind != "noria":
            return read_counters(pathlib.Path(self._files.counter_folder))
        with NO_PROXY_OPENER.open(f"http://127.0.0.1:{server.port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        names = ("noria_batch_size_count", "noria_batch_size_sum", "noria_tokens_total", "noria_padding_tokens_total")
        batches, texts, tokens, padding = (sum_series(text, name) for name in names)
        return batches, texts, tokens, tokens + padding

    def _vectors(self, corpus: Corpus) -> pathlib.Path:
        return self.work / f"{corpus}.npy"
