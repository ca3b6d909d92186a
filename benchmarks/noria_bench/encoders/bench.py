"""`noria bench encoders`: runs the targets in turn, in rounds, each time as a fresh server.

In each round a server gets a warm-up whose answers are all compared, then closed loops of each corpus, then open loops.
The raw loop is measured first: the rates of the open loops are shares of it. Then the settings of the targets that have
several candidates are swept. Odd rounds go through the targets backwards, so that a drift of the machine's speed
affects all alike. A target that fails is reported, and the next one starts; Ctrl-C and SIGTERM keep what was measured.
"""

import importlib.util
import os
import pathlib
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

import msgspec

from noria.config import Config, cache_folder
from noria.engine.encoder.graph_sessions import has_bfloat16
from noria.engine.encoder.sessions import num_cores, resolve_sessions
from noria.errors import ConfigError, NoriaError
from noria.models.catalog import open_model_of
from noria.models.encoder.onnx_export import find_or_export
from noria.protocol.text import EncoderModelSpec
from noria.testing.server import NO_PROXY_OPENER, RunningServer, config_flags, running_process, running_server
from noria_bench.encoders import load_tools
from noria_bench.encoders.catalog import INTERFACES, EncoderTarget, make_targets
from noria_bench.encoders.client import ClientConfig, ClientResult
from noria_bench.encoders.corpus import FIXED_TEXT, mixed_texts
from noria_bench.encoders.options import Corpus, EncodersOptions
from noria_bench.encoders.report import write_report
from noria_bench.encoders.results import (
    MIN_COSINE,
    TOLERANCE,
    EncodersResult,
    Load,
    Measurement,
    SweepRow,
    TargetRun,
    write_result,
)
from noria_bench.encoders.servers.job import EncoderFiles, EncoderJob, ServerSettings
from noria_bench.encoders.servers.onnx_encoder import read_counters
from noria_bench.encoders.servers.raw_loop import RawJob, RawResult
from noria_bench.measurement.provenance import collect_provenance
from noria_bench.measurement.resource_monitor import monitor_resources
from noria_bench.measurement.run_metrics import percentile
from noria_bench.running import run_to_end, status_log
from noria_bench.targets import environments
from noria_bench.targets.server import quiet_config

_log_status = status_log("encoders")
# Texts whose right vectors are known, which the warm-up sends.
_NUM_CHECKED = 256
_WARM_UP_CONNECTIONS = 16
_SWEEP_CONNECTIONS = 32
_SWEEP_S = 3.0
_TO_JSON = msgspec.json.encode


def main(config: Config, options: EncodersOptions, folder: pathlib.Path) -> int:
    """Measure, write JSON, the report and the plots into `folder`, print the report; returns the exit status.

    Raises:
        NoriaError: the model is no encoder of embeddings, a target is not installed, or the folder cannot be created.

    """
    with tempfile.TemporaryDirectory(prefix="noria-encoders-") as name:
        bench = EncodersBench(quiet_config(config), options, folder, pathlib.Path(name))
        status = run_to_end(bench.measure, _log_status, bench.failures)
    if bench.runs:
        print(write_report(bench.result(), folder)[0].read_text(encoding="utf-8"))
    for text in (*(f"left out: {each}" for each in bench.left_out), *bench.failures):
        _log_status(text)
    return status


@dataclass
class EncodersBench:
    """The state of the bench: what has been measured so far."""

    config: Config
    options: EncodersOptions
    folder: pathlib.Path
    work: pathlib.Path  # temporary
    sweep: list[SweepRow] = field(default_factory=list)
    runs: list[TargetRun] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    raw_texts_per_s: float = 0.0
    complete: bool = False

    def __post_init__(self) -> None:
        self.spec = open_model_of(EncoderModelSpec, self.config.model)
        if self.spec.task != "embedding":
            raise ConfigError(
                f"{self.spec.name} is for {self.spec.task}; this bench needs a model of embeddings, such as minilm."
            )
        engine = self.config.engine
        sessions, session_threads = resolve_sessions(engine, self.spec.num_parameters, num_cores(engine))
        self.threads = sessions * session_threads
        targets = make_targets(self.threads)
        self.targets = [targets[name] for name in self.options.targets]
        for target in self.targets:
            if target.kind != "raw" and (framework := INTERFACES[target.kind].framework) is not None:
                environments.python_of(framework)
        if reason := _without_bfloat16():
            self.left_out += [f"{each.name}: {reason}" for each in self.targets if each.precision == "bfloat16"]
            self.targets = [target for target in self.targets if target.precision == "float32"]
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"--out {self.folder} cannot be created ({error}); name a folder, which need not exist."
            ) from error
        self._provenance = collect_provenance()
        self.texts: dict[Corpus, list[str]] = {"fixed": [FIXED_TEXT], "mixed": mixed_texts(self.options.seed)}

    def measure(self) -> None:
        """Measure everything; saves after each server."""
        _log_status("exporting the model, if that was not done, and computing what is right")
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
            file = str(self._vectors(corpus))
            run_module(
                "servers.raw_loop", RawJob(self.spec, self.config.engine, tuple(texts[:_NUM_CHECKED]), vectors=file)
            )
        raw = self._raw_loop("mixed", "float32")
        self.raw_texts_per_s = raw.num_texts / raw.seconds
        settings = {target.name: self._best_settings(target) for target in self.targets if target.kind != "raw"}
        for number in range(self.options.num_rounds):
            for target in self.targets if number % 2 == 0 else reversed(self.targets):
                try:
                    self.runs.append(
                        self._raw_run(target, number)
                        if target.kind == "raw"
                        else self._server_run(target, settings[target.name], number)
                    )
                except (RuntimeError, OSError, NoriaError) as error:
                    self.failures.append(f"round {number + 1}: {target.name} failed: {error}")
                    _log_status(self.failures[-1])
                write_result(self.result(), self.folder)
        self.complete = True
        write_result(self.result(), self.folder)

    def result(self) -> EncodersResult:
        """The document so far."""
        spec = self.spec
        return EncodersResult(
            provenance=self._provenance,
            model={
                "name": spec.name,
                "fingerprint": spec.fingerprint,
                "parameters": spec.num_parameters,
                "max_tokens": spec.max_length,
            },
            options=asdict(self.options),
            corpus={"num_texts": len(self.texts["mixed"]), "fixed": FIXED_TEXT},
            threads=self.threads,
            raw_texts_per_s=self.raw_texts_per_s,
            sweep=self.sweep,
            runs=self.runs,
            left_out=self.left_out,
            failures=self.failures,
            complete=self.complete,
        )

    def _vectors(self, corpus: Corpus) -> pathlib.Path:
        return self.work / f"{corpus}.npy"

    def _best_settings(self, target: EncoderTarget) -> ServerSettings:
        """The candidate with the most requests per second on mixed texts; the first one without a sweep."""
        if len(target.candidates) == 1 or not self.options.sweeps:
            return target.candidates[0]
        rates = list[float]()
        for settings in target.candidates:
            try:
                with self._server(target, settings) as server:
                    self._client(target, server, "mixed", connections=_WARM_UP_CONNECTIONS, num_requests=64)
                    rates.append(
                        self._client(
                            target, server, "mixed", connections=_SWEEP_CONNECTIONS, seconds=_SWEEP_S
                        ).requests_per_s
                    )
            except (RuntimeError, OSError) as error:
                self.failures.append(f"sweep: {target.name} with {settings} failed: {error}")
                rates.append(0.0)
            _log_status(f"sweep: {target.name} {_plain(settings)}: {rates[-1]:.1f} requests/s")
        best = rates.index(max(rates))
        self.sweep += [
            SweepRow(target.name, msgspec.to_builtins(settings), rate, chosen=index == best)
            for index, (settings, rate) in enumerate(zip(target.candidates, rates, strict=True))
        ]
        return target.candidates[best]

    @contextmanager
    def _server(self, target: EncoderTarget, settings: ServerSettings) -> Iterator[RunningServer]:
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

    def _server_run(self, target: EncoderTarget, settings: ServerSettings, number: int) -> TargetRun:
        """Measure a target once."""
        framework = INTERFACES[target.kind].framework
        own_settings = {} if target.kind == "noria" else msgspec.to_builtins(settings)
        _log_status(f"round {number + 1}: {target.name}: starting")
        with self._server(target, settings) as server:
            found = self._client(target, server, "mixed", connections=_WARM_UP_CONNECTIONS, num_requests=_NUM_CHECKED)
            load = Load("mixed", "closed", "own", _WARM_UP_CONNECTIONS)
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
            return self._client(
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
        return self._client(
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
            self._client(target, server, "fixed", connections=self.threads, num_requests=self.threads)

    def _client(
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
        return msgspec.json.decode(run_module("client", config), type=ClientResult)

    def _batches(self, target: EncoderTarget, server: RunningServer) -> Sequence[float]:
        """Batches, texts, tokens and tokens with padding, since the start; Noria's by its metrics."""
        if target.kind != "noria":
            return read_counters(pathlib.Path(self._files.counter_folder))
        with NO_PROXY_OPENER.open(f"http://127.0.0.1:{server.port}/metrics", timeout=30) as answer:
            text = answer.read().decode()
        names = ("noria_batch_size_count", "noria_batch_size_sum", "noria_tokens_total", "noria_padding_tokens_total")
        batches, texts, tokens, padding = (sum_series(text, name) for name in names)
        return batches, texts, tokens, tokens + padding

    def _raw_loop(self, corpus: Corpus, precision: str) -> RawResult:
        engine = msgspec.structs.replace(self.config.engine, encoder_precision=precision)
        job = RawJob(
            self.spec, engine, tuple(self.texts[corpus] * (8 if corpus == "fixed" else 1)), self.options.seconds
        )
        return msgspec.json.decode(run_module("servers.raw_loop", job), type=RawResult)

    def _raw_run(self, target: EncoderTarget, number: int) -> TargetRun:
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


def _without_bfloat16() -> str | None:
    """Why nothing can be computed in bfloat16 here; None if it can."""
    if importlib.util.find_spec("openvino") is None:
        return "it needs noria-serve[openvino]"
    return None if has_bfloat16() else "this CPU has no bfloat16 (neither AVX512-BF16 nor AMX)"


def run_module(name: str, job: msgspec.Struct) -> bytes:
    """What a module of this package prints for a job. Raises RuntimeError if it fails; its stderr is ours."""
    command = [sys.executable, "-m", f"noria_bench.encoders.{name}"]
    done = subprocess.run(command, input=_TO_JSON(job), stdout=subprocess.PIPE, check=False)
    if done.returncode:
        raise RuntimeError(f"{name} ended with status {done.returncode}; its stderr is above")
    return done.stdout


def make_measurement(load: Load, found: ClientResult, precision: str) -> Measurement:
    """What the client found; vectors of another `precision` than float32 may differ more."""
    latencies_s = [*found.latencies_s, *[float("inf")] * found.num_failed]
    p50_ms, p95_ms, p99_ms = (_milliseconds(percentile(latencies_s, share)) for share in (0.5, 0.95, 0.99))
    wrong = [
        difference > TOLERANCE if precision == "float32" else cosine < MIN_COSINE
        for difference, cosine in zip(found.differences, found.cosines, strict=True)
    ]
    return Measurement(
        load=load,
        requests_per_s=found.requests_per_s,
        num_ok=len(found.latencies_s),
        num_failed=found.num_failed,
        p50_ms=p50_ms,
        p95_ms=p95_ms,
        p99_ms=p99_ms,
        num_compared=len(wrong),
        num_wrong=sum(wrong),
        max_difference=max(found.differences, default=None),
        min_cosine=min(found.cosines, default=None),
    )


def sum_series(text: str, name: str) -> float:
    """The sum of all series of a metric in Prometheus' text format."""
    lines = (line for line in text.splitlines() if line.startswith((name + " ", name + "{")))
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def _milliseconds(seconds: float) -> float | None:
    return 1000 * seconds if seconds < float("inf") else None


def _plain(settings: ServerSettings) -> str:
    return ", ".join(f"{name} {value}" for name, value in msgspec.to_builtins(settings).items())
