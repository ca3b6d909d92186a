"""Measures one target once: starts it as a fresh server, warms it up, loads it.

The warm-up's answers are all compared; then come closed loops of each corpus, then open loops, whose rates are shares
of the raw loop's.
"""

import os
import pathlib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from noria.config import Config
from noria.folders import cache_folder
from noria.models.encoder.onnx_export import find_or_export
from noria.protocol.text import EncoderModelSpec
from noria.testing.server import NO_PROXY_OPENER, RunningServer, config_flags, running_process, running_server
from noria_bench.encoders import load_tools
from noria_bench.encoders.catalog import INTERFACES, EncoderTarget, Form
from noria_bench.encoders.client import ClientConfig, ClientResult
from noria_bench.encoders.corpus import FIXED_TEXT, mixed_texts
from noria_bench.encoders.measurements import make_measurement, sum_series
from noria_bench.encoders.options import Corpus, EncodersOptions
from noria_bench.encoders.results import Load, Measurement, TargetRun
from noria_bench.encoders.servers.job import Checkpoint, EncoderFiles, EncoderJob, Precision, ServerSettings
from noria_bench.encoders.servers.raw_loop import RawJob, RawResult
from noria_bench.encoders.servers.text_encoder import read_counters
from noria_bench.measurement.resource_monitor import monitor_resources
from noria_bench.running import run_module, status_log
from noria_bench.targets import environments
from noria_bench.targets.server import interpreter_of

WARM_UP_CONNECTIONS = 16
# Texts whose right vectors are known, which the warm-up sends.
_NUM_CHECKED = 256
_MAX_WARM_UP_S = 120.0
# On a GPU, shapes of batches cost time when they first occur, and the most connections make other shapes.
_GPU_WARM_UP_S = 3.0
# Noria's servers have these; without the second, threads of torch that wait for each other keep cores from others.
_AS_NORIA = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", "GOMP_SPINCOUNT": "10000"}
_RAW_BATCH, _GPU_RAW_BATCH = 8, 64
_TO_JSON = msgspec.json.encode
_log_status = status_log("encoders")


@dataclass
class TargetRunner:
    """Runs targets, one at a time."""

    config: Config
    options: EncodersOptions
    spec: EncoderModelSpec
    form: Form
    folder: pathlib.Path  # folder of the results
    work: pathlib.Path  # temporary
    raw_texts_per_s: float = 0.0  # rate of the raw loop; 0 until `prepare`

    def __post_init__(self) -> None:
        self.texts: dict[Corpus, list[str]] = {"fixed": [FIXED_TEXT], "mixed": mixed_texts(self.options.seed)}

    def prepare(self) -> None:
        """Export the model if it is needed and not done, compute what is right, measure the raw loop for open loops."""
        for name, value in _AS_NORIA.items():
            os.environ.setdefault(name, value)
        counters, form = self.work / "counters", self.form
        counters.mkdir()
        self._files = EncoderFiles(
            tokenizer=str(self.spec.path / "tokenizer.json"),
            max_tokens=self.spec.max_length,
            normalize=self.spec.normalize,
            counter_folder=str(counters),
        )
        if form.by_torch:
            checkpoint = Checkpoint(self.spec, form.device, form.precision)
            self._files = msgspec.structs.replace(self._files, checkpoint=checkpoint)
        else:
            graph = find_or_export(self.spec, cache_folder(self.config.engine.cache_dir, os.environ))
            self._files = msgspec.structs.replace(
                self._files, onnx=str(graph.file), inputs=graph.record.inputs, output=graph.record.output
            )
        self._compute_vectors()
        if self.options.load_percents and "mixed" in self.options.corpora:
            raw = self._raw_loop("mixed", form.precision)
            self.raw_texts_per_s = raw.num_texts / raw.seconds

    def _compute_vectors(self) -> None:
        """Write what is right, of all corpora by one process."""
        checked = {corpus: texts[:_NUM_CHECKED] for corpus, texts in self.texts.items()}
        file = self.work / "vectors.npy"
        texts = tuple(text for each in checked.values() for text in each)
        job = RawJob(self.spec, self.config.engine, texts, vectors=str(file), device=self.form.device)
        run_module("noria_bench.encoders.servers.raw_loop", job)
        vectors, start = np.load(file), 0
        for corpus, each in checked.items():
            np.save(self._vectors(corpus), vectors[start : start + len(each)])
            start += len(each)

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

    def _raw_loop(self, corpus: Corpus, precision: Precision) -> RawResult:
        """Run the raw loop once."""
        batch = _RAW_BATCH if self.form.device == "cpu" else _GPU_RAW_BATCH
        job = RawJob(
            self.spec,
            msgspec.structs.replace(self.config.engine, encoder_precision=precision),
            tuple(self.texts[corpus] * (batch if corpus == "fixed" else 1)),
            self.options.seconds,
            files=self._files_in(precision) if self.form.by_torch else None,
            threads=self.form.threads,
            batch=batch,
        )
        return msgspec.json.decode(run_module("noria_bench.encoders.servers.raw_loop", job), type=RawResult)

    def _files_in(self, precision: Precision) -> EncoderFiles:
        """The files, with the checkpoint in another precision."""
        assert self._files.checkpoint is not None
        checkpoint = msgspec.structs.replace(self._files.checkpoint, precision=precision)
        return msgspec.structs.replace(self._files, checkpoint=checkpoint)

    def server_run(self, target: EncoderTarget, settings: ServerSettings, number: int) -> TargetRun:
        """Measure a target once."""
        framework = INTERFACES[target.kind].framework
        own_settings = {} if target.kind == "noria" else msgspec.to_builtins(settings)
        _log_status(f"round {number + 1}: {target.name}: starting")
        with self.server(target, settings) as server:
            check = self.warm_up(target, server)
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

    def warm_up(self, target: EncoderTarget, server: RunningServer, num_requests: int = _NUM_CHECKED) -> Measurement:
        """Send the first requests, all of whose answers are compared.

        Raises:
            RuntimeError: there is no answer but errors.

        """
        found = self.client(
            target, server, "mixed", connections=WARM_UP_CONNECTIONS, num_requests=num_requests, seconds=_MAX_WARM_UP_S
        )
        if not found.latencies_s:
            raise RuntimeError(f"it answers only errors: {found.failures}, the first one {found.first_error!r}")
        if self.form.device != "cpu":
            most = max(self.options.connections)
            self.client(target, server, "mixed", connections=most, seconds=_GPU_WARM_UP_S)
        return make_measurement(Load("mixed", "closed", "own", WARM_UP_CONNECTIONS), found, target.precision)

    @contextmanager
    def server(self, target: EncoderTarget, settings: ServerSettings) -> Iterator[RunningServer]:
        """A fresh server for `target`."""
        if target.kind == "noria":
            with running_server([self.config.model, *config_flags(self._config_of(target))]) as server:
                yield server
            return
        interface = INTERFACES[target.kind]
        python = interpreter_of(interface.framework)

        def command(port: int) -> list[str]:
            job = EncoderJob(self._files, port, self.form.threads, self.spec.dimensions, settings, os.getpid())
            return [python, "-m", interface.module, _TO_JSON(job).decode()]

        log = self.folder / "logs" / f"{target.name}.log"
        log.parent.mkdir(exist_ok=True)
        with running_process(command, log=log, ready_path=interface.ready_path) as server:
            yield server

    def _config_of(self, target: EncoderTarget) -> Config:
        engine = msgspec.structs.replace(self.config.engine, encoder_precision=target.precision)
        config = msgspec.structs.replace(self.config, engine=engine)
        if target.processes is None:
            return config
        frontend = msgspec.structs.replace(config.frontend, processes=target.processes)
        return msgspec.structs.replace(config, frontend=frontend)

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
        """Run one load; measure the CPU time and the batches of the server meanwhile."""
        seconds = self.options.seconds
        cpu_s, batches = server.cpu_s_by_name(), self._batches(target, server)
        with monitor_resources(server, interval_s=1.0) as resources:
            if load.client == "own":
                measurement = make_measurement(load, self._own_load(target, server, load, number), target.precision)
            else:
                measurement = self._tool_load(target, server, load, number)
                # Wait for the requests that ab or wrk left behind: a later one is answered after them.
                for _ in range(2):
                    self.client(target, server, "fixed", connections=self.form.threads, num_requests=self.form.threads)
        new = [after - before for before, after in zip(batches, self._batches(target, server), strict=True)]
        used_s = {name: seconds - cpu_s.get(name, 0.0) for name, seconds in server.cpu_s_by_name().items()}
        measurement = msgspec.structs.replace(
            measurement,
            cpu_s=sum(used_s.values()),
            cpu_s_by_process=used_s,
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
        bodies.write_bytes(b"\n".join(map(interface.body, self.texts[load.corpus])))
        folder = self.folder / load.client
        folder.mkdir(exist_ok=True)
        output = folder / f"{target.name}-{load.connections}-connections-round-{number + 1}.txt"
        if load.client == "ab":
            return load_tools.run_ab(url, bodies, interface.headers, load, self.options.seconds, output)
        return load_tools.run_wrk(url, bodies, interface.headers, 997 * number, load, self.options.seconds, output)

    def client(
        self, target: EncoderTarget, server: RunningServer, corpus: Corpus, *, seconds: float = 600.0, **load: Any
    ) -> ClientResult:
        """Run the bench's own client; `load` has more fields of its `ClientConfig`. Raises RuntimeError if it fails."""
        assert target.kind != "raw"
        texts, vectors = tuple(self.texts[corpus]), str(self._vectors(corpus))
        config = ClientConfig(server.port, target.kind, texts, vectors, seconds, **load)
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
