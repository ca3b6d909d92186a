"""`noria bench sharing`: what embeddings and images on one CPU cost each other, by `engine.encoder_cores`.

Each value of the setting gets a fresh server with models of both kinds, in rounds, of which the odd ones go backwards.
Each load of texts is sent alone, then while users keep the image engine busy; images are also generated alone. Images
per second and CPU times are of the time in which texts were sent. Ctrl-C and SIGTERM keep what was measured.
"""

import contextlib
import os
import pathlib
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

import msgspec
import psutil

from noria.config import Config
from noria.engine.encoder.sessions import resolve_precision
from noria.observe.cgroup import cpu_limit, usable_cores
from noria.testing.server import NO_PROXY_OPENER, RunningServer, config_flags, running_server
from noria_bench.encoders.client import ClientConfig, ClientResult
from noria_bench.encoders.corpus import FIXED_TEXT
from noria_bench.encoders.measurements import make_measurement, sum_series
from noria_bench.encoders.results import Load
from noria_bench.encoders.servers.raw_loop import RawJob
from noria_bench.load.closed_loop import Reply, run_closed_loop
from noria_bench.load.workload import uniform
from noria_bench.measurement.provenance import collect_provenance
from noria_bench.measurement.resource_monitor import machine_cpu_s
from noria_bench.running import (
    in_background,
    make_results_folder,
    open_both_models,
    run_module,
    run_to_end,
    status_log,
    write_json,
)
from noria_bench.sharing.options import SharingOptions
from noria_bench.sharing.report import write_report
from noria_bench.sharing.results import FILE_NAME, SharingResult, SharingRun
from noria_bench.targets.server import isolated_config

_log_status = status_log("sharing")
_WARM_UP_TEXTS = 64
# Until the batch of images is full.
_RAMP_S = 1.0
# Longer than a load; the image users end with it.
_MAX_S = 3600.0


def main(config: Config, options: SharingOptions, folder: pathlib.Path) -> int:
    """Measure, write JSON, the report and the plot into `folder`, print the report; returns the exit status.

    Raises:
        NoriaError: a model is not of its kind, or the folder cannot be created.

    """
    make_results_folder(folder)
    with tempfile.TemporaryDirectory(prefix="noria-sharing-") as name:
        bench = SharingBench(isolated_config(config, name), options, folder, pathlib.Path(name))
        status = run_to_end(bench.measure, _log_status, bench.failures)
    if bench.runs:
        print(write_report(bench.result(), folder)[0].read_text(encoding="utf-8"))
    return status


@dataclass(frozen=True)
class _Reading:
    """Counters of a moment."""

    at_s: float
    num_steps: float  # steps of images, in all batches
    cpu_s: dict[str, float]  # as `SharingRun.cores`


@dataclass
class SharingBench:
    """The state of the bench: what has been measured so far."""

    config: Config
    options: SharingOptions
    folder: pathlib.Path
    work: pathlib.Path  # temporary
    runs: list[SharingRun] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    complete: bool = False

    def __post_init__(self) -> None:
        self.config, self.images, self.encoder = open_both_models(self.config)
        self._provenance = collect_provenance()

    def measure(self) -> None:
        """Measure everything; saves after each load."""
        _log_status("computing what is right")
        self._vectors = str(self.work / "vectors.npy")
        run_module(
            "noria_bench.encoders.servers.raw_loop",
            RawJob(self.encoder, self.config.engine, (FIXED_TEXT,), vectors=self._vectors),
        )
        for number in range(self.options.num_rounds):
            values = divisions(self.config)
            for value in values if number % 2 == 0 else reversed(values):
                self._measure_division(value, number)
        self.complete = True
        write_json(self.result(), self.folder / FILE_NAME)

    def result(self) -> SharingResult:
        """The document so far."""
        return SharingResult(
            provenance=self._provenance,
            models={"images": self.images.name, "texts": self.encoder.name},
            options=asdict(self.options),
            text=FIXED_TEXT,
            runs=self.runs,
            failures=self.failures,
            complete=self.complete,
        )

    def _measure_division(self, encoder_cores: int | str, number: int) -> None:
        """All loads, with a value of the setting."""
        engine = msgspec.structs.replace(self.config.engine, encoder_cores=encoder_cores)
        config = msgspec.structs.replace(self.config, engine=engine)
        _log_status(f"round {number + 1}: encoder_cores {encoder_cores}: starting")
        with running_server([config.model, *config_flags(config)]) as server:
            self._warm_up(server)
            loads = [Load("fixed", "closed", "own", connections) for connections in self.options.connections]
            loads.append(Load("fixed", "open", "own", rate=self.options.rate))
            for load, has_images in [
                *((load, False) for load in loads),
                (None, True),
                *((load, True) for load in loads),
            ]:
                run = self._measure(server, str(encoder_cores), number, load, has_images)
                self.runs.append(run)
                write_json(self.result(), self.folder / FILE_NAME)
                _log_status(f"round {number + 1}: encoder_cores {encoder_cores}: {_plain(run)}")

    def _warm_up(self, server: RunningServer) -> None:
        config = self._client_config(server, Load("fixed", "closed", "own", 4), 0)
        run_module("noria_bench.encoders.client", msgspec.structs.replace(config, num_requests=_WARM_UP_TEXTS))
        run_closed_loop(server.port, self.options.num_users, _RAMP_S, self._image_body)

    def _measure(
        self, server: RunningServer, encoder_cores: str, number: int, load: Load | None, has_images: bool
    ) -> SharingRun:
        """Measure a load of texts (None: images alone), beside images or not."""
        seconds = self.options.seconds * (2 if load is not None and load.loop == "open" else 1)
        replies: list[Reply] = []
        found: ClientResult | None = None
        with self._image_users(server, replies) if has_images else contextlib.nullcontext():
            if load is None:
                before, after = self._observe(server, seconds)
            else:
                with _started_client(self._client_config(server, load, number)) as client:
                    before, after = self._observe(server, seconds, client)
                    found = msgspec.json.decode(client.communicate()[0], type=ClientResult)
        elapsed_s = after.at_s - before.at_s
        num_calls = next(uniform(self.images).templates(1)).num_calls
        precision = resolve_precision(self.config.engine, "cpu")
        return SharingRun(
            encoder_cores=encoder_cores,
            round=number,
            texts=None if load is None or found is None else make_measurement(load, found, precision),
            images_per_s=(after.num_steps - before.num_steps) / num_calls / elapsed_s if has_images else None,
            cores={name: max(0.0, cpu_s - before.cpu_s[name]) / elapsed_s for name, cpu_s in after.cpu_s.items()},
            num_images=sum(reply.status == 200 for reply in replies),
            num_images_failed=sum(reply.status != 200 for reply in replies),
        )

    def _observe(
        self, server: RunningServer, seconds: float, client: "subprocess.Popen[bytes] | None" = None
    ) -> tuple[_Reading, _Reading]:
        """Read the counters before and after `seconds`, in which `client` sends its texts."""
        before = self._read(server)
        if client is not None:
            assert client.stdin is not None
            client.stdin.write(b"\n")
            client.stdin.flush()
        time.sleep(seconds)
        return before, self._read(server)

    def _read(self, server: RunningServer) -> _Reading:
        at_s, all_s, mine = time.monotonic(), machine_cpu_s(), psutil.Process()
        by_pid = server.cpu_s()
        engines = sorted(server.children("engine"), key=lambda each: each.cmdline())
        # Those of the first model's kind come first.
        num = len(self.config.engine.devices)
        images_s, texts_s = (
            sum(by_pid[engine.pid] for engine in each if engine.pid in by_pid)
            for each in (engines[:num], engines[num:])
        )
        server_s = sum(by_pid.values())
        bench_s = sum(mine.cpu_times()[:4])
        bench_s += sum(sum(child.cpu_times()[:2]) for child in mine.children() if child.pid != server.process.pid)
        with NO_PROXY_OPENER.open(f"http://127.0.0.1:{server.port}/metrics", timeout=60) as answer:
            num_steps = sum_series(answer.read().decode(), "noria_denoise_steps_total")
        return _Reading(
            at_s,
            num_steps,
            {
                "image engine": images_s,
                "text engine": texts_s,
                "rest of the server": server_s - images_s - texts_s,
                "bench": bench_s,
                "others": all_s - server_s - bench_s,
            },
        )

    @contextlib.contextmanager
    def _image_users(self, server: RunningServer, replies: list[Reply]) -> Iterator[None]:
        """Users who keep the image engine busy; at the end they wait for their last images."""

        def run(ended: threading.Event) -> None:
            replies.extend(run_closed_loop(server.port, self.options.num_users, _MAX_S, self._image_body, ended=ended))

        with in_background(run):
            time.sleep(_RAMP_S)
            yield

    def _image_body(self, number: int) -> dict[str, object]:
        template = next(uniform(self.images).templates(self.options.seed + number))
        return template.body | {"metadata": False}

    def _client_config(self, server: RunningServer, load: Load, number: int) -> ClientConfig:
        """The client of a load. All values of the setting get the same arrivals, each round others."""
        arrivals, rate, seconds = list[tuple[float, int]](), load.rate or 0.0, self.options.seconds
        if load.loop == "open":
            rng, now_s, seconds = random.Random(f"{self.options.seed} {number}"), 0.0, 2 * seconds
            while (now_s := now_s + rng.expovariate(rate)) < seconds:
                arrivals.append((now_s, 0))
        return ClientConfig(
            port=server.port,
            kind="noria",
            texts=(FIXED_TEXT,),
            vectors=self._vectors,
            connections=load.connections or 0,
            seconds=seconds,
            arrivals=tuple(arrivals or [(0.0, 0)]) if load.loop == "open" else (),
            waits=True,
        )


def divisions(config: Config) -> list[int | str]:
    """The values of `engine.encoder_cores` to measure: `shared`, `auto`, and the one given, or half of the cores."""
    cores = usable_cores(len(os.sched_getaffinity(0)), cpu_limit())
    given = config.engine.encoder_cores
    split = given if isinstance(given, int) else cores // 2
    return ["shared", "auto", *([split] if split else [])]


@contextlib.contextmanager
def _started_client(config: ClientConfig) -> Iterator["subprocess.Popen[bytes]"]:
    """The bench's client of texts, ready to send. Raises RuntimeError if it fails."""
    command = [sys.executable, "-m", "noria_bench.encoders.client"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
        assert client.stdin is not None and client.stdout is not None
        try:
            client.stdin.write(msgspec.json.encode(config) + b"\n")
            client.stdin.flush()
            if client.stdout.readline() != b"\n":
                raise RuntimeError("the client of texts ended; its stderr is above")
            yield client
        finally:
            client.kill()


def _plain(run: SharingRun) -> str:
    texts, parts = run.texts, []
    if texts is not None:
        what = f"{texts.load.connections} connections" if texts.load.loop == "closed" else f"{texts.load.rate:g}/s"
        p99 = "–" if texts.p99_ms is None else f"{texts.p99_ms:.1f} ms"
        parts.append(f"texts, {what}: {texts.requests_per_s:.1f}/s, p99 {p99}")
    if run.images_per_s is not None:
        parts.append(f"{run.images_per_s:.2f} images/s")
    return "; ".join(parts)
