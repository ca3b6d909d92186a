"""A server's processes with full metrics and without a model: `python -m noria_bench.cost.synthetic_metrics JSON`, for
`noria bench cost`.

The first process is the supervisor, which starts the others. Each fills 100 label sets in its own files, as
prometheus_client stores them for several processes. One front end answers on a port with Noria's own routes. Processes
that ended earlier are only files: copies of the first engine's, merged one after the other, as the supervisor does it.
"""

import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from typing import Any, Literal

import msgspec
import setproctitle
from msgspec import Struct

from noria.observe.metrics.dead_processes import merge_dead_processes
from noria.protocol.process_signals import die_with_parent
from noria.protocol.tasks import engine_name

LABEL_SETS = 100
# Above the largest process id.
_UNUSED_PID = 2**22 + 1


class SyntheticProcess(Struct, frozen=True):
    """The role of a process, and the number of processes that it starts."""

    role: Literal["supervisor", "frontend", "engine"]
    name: str
    port: int
    parent_pid: int
    num_frontends: int = 1
    num_engines: int = 1
    num_restarts: int = 0


def main(process: SyntheticProcess) -> int:
    """Run the process until SIGTERM; returns the exit status."""
    die_with_parent(signal.SIGKILL if process.role != "supervisor" else signal.SIGTERM, process.parent_pid)
    if process.role == "supervisor":
        setproctitle.setproctitle("noria supervisor")
        return _supervise(process)
    setproctitle.setproctitle(f"noria {process.role} {process.name}")
    populate_metrics(process.name, [engine_name(k) for k in range(process.num_engines)])
    print("ready", flush=True)
    if process.port:
        _serve(process.port)
    else:
        signal.pause()
    return 0


def populate_metrics(name: str, engines: list[str]) -> None:
    """Fill `LABEL_SETS` label sets of HTTP requests and their times, as many of image requests, and some of all other
    metrics.

    Every process fills all of them, except those of an engine, which only the one of `engines` called `name` has.
    """
    from noria.observe.metrics import declarations
    from noria.observe.metrics.engine_series import init_engine_series
    from noria.observe.metrics.exposition import keep_exemplar

    for k in range(LABEL_SETS):
        method, path, exemplar = ("GET", "POST")[k % 2], f"/v1/path-{k // 2}", {"request_id": f"{k:032x}"}
        declarations.HTTP_REQUESTS.labels(method, path, "200").inc()
        observed: list[Any] = [(declarations.HTTP_REQUEST_SECONDS, 0.037 * k, (method, path))]
        if k < 5:
            observed += [
                (declarations.REQUEST_SECONDS, 0.3 * k, (f"model-{k}",)),
                (declarations.QUEUE_SECONDS, 0.1 * k, (f"model-{k}",)),
            ]
        for histogram, seconds, labels in observed:
            histogram.labels(*labels).observe(seconds)
        keep_exemplar(exemplar, *observed)
        declarations.REQUESTS.labels(f"model-{k % 5}", f"outcome-{k // 5}").inc()
    for stage in ("queue", "text_encode", "denoise", "decode", "postprocess"):
        declarations.STAGE_SECONDS.labels("model-0", stage).observe(0.1)
    for k in range(declarations.MAX_SHAPES):
        declarations.ITERATION_SECONDS.labels(f"{8 * k}x{8 * k}").observe(0.01 * k)
    init_engine_series(engines)
    if name in engines:
        _populate_engine_metrics(name)


def _populate_engine_metrics(engine: str) -> None:
    """Fill the metrics of one engine, with two models and the maximum number of outcomes."""
    from noria.observe.metrics import declarations

    for gauge in (declarations.ENGINE_UP, declarations.SLOTS, declarations.SLOTS_USED, declarations.QUEUE_DEPTH):
        gauge.labels(engine).set(1)
    for measure in (
        declarations.BACKLOG_SECONDS,
        declarations.QUEUE_OLDEST_AGE_SECONDS,
        declarations.DEVICE_MEMORY_BYTES,
    ):
        measure.labels(engine).set(3.3)
    declarations.BATCH_SIZE.labels(engine).observe(12)
    for k in range(2):
        declarations.DENOISE_STEPS.labels(engine, f"model-{k}").inc(12)
    for k in range(20):
        declarations.DEPARTURES.labels(engine, f"outcome-{k}").inc()


def _supervise(process: SyntheticProcess) -> int:
    with tempfile.TemporaryDirectory(prefix="noria-") as directory:
        environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": directory}
        names = [("engine", engine_name(k)) for k in range(process.num_engines)]
        # The one that answers starts last, when all others are full.
        names += [("frontend", f"frontend-{k}") for k in reversed(range(process.num_frontends))]
        children = []
        for role, name in names:
            child = msgspec.json.encode(
                {
                    "role": role,
                    "name": name,
                    "port": process.port if name == "frontend-0" else 0,
                    "parent_pid": os.getpid(),
                    "num_engines": process.num_engines,
                }
            )
            command = [sys.executable, "-m", "noria_bench.cost.synthetic_metrics", child.decode()]
            children.append(subprocess.Popen(command, stdout=subprocess.PIPE, env=environment))
            assert children[-1].stdout is not None
            children[-1].stdout.readline()
            if len(children) == 1:
                _simulate_restarts(pathlib.Path(directory), children[0].pid, process.num_restarts)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        try:
            children[-1].wait()
        finally:
            for child_process in children:
                child_process.kill()
                child_process.wait()
    return 1


def _simulate_restarts(folder: pathlib.Path, pid: int, num_restarts: int) -> None:
    """Add `num_restarts` processes that have ended, each with the metrics of `pid`."""
    for _ in range(num_restarts):
        for kind in ("counter", "histogram"):
            shutil.copy(folder / f"{kind}_{pid}.db", folder / f"{kind}_{_UNUSED_PID}.db")
        merge_dead_processes(str(folder))


def _serve(port: int) -> None:
    from noria.config import Config, FrontendConfig
    from noria.frontend.app import build_app
    from noria.frontend.engines.pool import EnginePool
    from noria.frontend.process import http_server

    with tempfile.TemporaryDirectory(prefix="noria-data-") as folder:
        link = EnginePool([])
        config = Config(data_dir=folder, frontend=FrontendConfig(drain_s=0.1))
        http_server(build_app(config, link), config.frontend).run(sockets=[socket.create_server(("127.0.0.1", port))])


if __name__ == "__main__":
    sys.exit(main(msgspec.json.decode(sys.argv[1], type=SyntheticProcess)))
