"""Front ends on loopback ports, in front of fake engines: in a thread of this process, or in a process of their own."""

import asyncio
import contextlib
import os
import pathlib
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
import psutil
import pytest
import uvicorn
from opentelemetry.trace import Tracer

from noria.config import Config, FrontendConfig
from noria.frontend.app import build_app
from noria.frontend.engines.pool import EnginePool
from noria.frontend.process import http_server
from noria.observe.traces.tracer import GLOBAL_TRACER
from noria.protocol.kinds import AnyModelSpec
from noria.protocol.routes import Routes
from noria.protocol.tasks import FrontendTask
from noria.supervisor.listener import open_listeners, server_url
from noria.testing.fake_encoder import FakeTokenizer
from noria.testing.fake_engine import FakeEngine, FakeEngineState
from waiting import wait_until, wait_until_async, wait_until_ready

DEFAULT_CONFIG, DEFAULT_FRONTEND = Config(), FrontendConfig()


@contextlib.contextmanager
def serving(
    config: Config,
    engine: FakeEngine,
    tracer: Tracer = GLOBAL_TRACER,
    restart_wait_s: float = 60.0,
    name: str = "front end",
    routes: Routes = Routes(),  # noqa: B008 - immutable
    checkpoints: Sequence[str] = (),
) -> Iterator[tuple[str, uvicorn.Server]]:
    """A front end's address and its server, which stops at the end of the context or when `should_exit` is set.

    Its data folder is its own unless `config` names one, so that no other test's front end runs its jobs. `name` is
    that of its thread.
    """
    with tempfile.TemporaryDirectory(prefix="noria-data") as data_dir:
        own = config if config.data_dir != "auto" else msgspec.structs.replace(config, data_dir=data_dir)
        with _serving(own, engine, tracer, restart_wait_s, name, routes, checkpoints) as served:
            yield served


@contextlib.contextmanager
def _serving(
    config: Config,
    engine: FakeEngine,
    tracer: Tracer,
    restart_wait_s: float,
    name: str,
    routes: Routes,
    checkpoints: Sequence[str],
) -> Iterator[tuple[str, uvicorn.Server]]:
    engine_pool = EnginePool([engine.address], restart_wait_s=restart_wait_s)
    app = build_app(config, engine_pool, tracer=tracer, load_tokenizer=FakeTokenizer, checkpoints=checkpoints)
    app.state.submission.versions.follow(routes)
    server = http_server(app, config.frontend)
    with open_listeners(msgspec.structs.replace(config.frontend, port=0)) as (listener, *_):
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, name=name)
        thread.start()
        try:
            yield server_url(listener, has_tls=bool(config.frontend.ssl_certfile)), server
        finally:
            server.should_exit = True
            thread.join()


class ServedClient(httpx.Client):
    """A client of a front end, which has the fake engine behind it as `engine`."""

    engine: FakeEngine


@contextlib.contextmanager
def served_client(
    config: Config, engine: FakeEngine, headers: Mapping[str, str] | None = None, **options: Any
) -> Iterator[ServedClient]:
    """A client of a front end as of `serving`, once its engine is ready."""
    with (
        serving(config, engine, **options) as (url, _),
        ServedClient(base_url=url, headers=headers, timeout=60, verify=False) as client,
    ):
        wait_until(lambda: client.get("/readyz").status_code == 200)
        client.engine = engine
        yield client


@contextlib.contextmanager
def served_models(
    folder: pathlib.Path, *models: AnyModelSpec, config: Config = DEFAULT_CONFIG
) -> Iterator[ServedClient]:
    """A client of a front end before a fake engine of its own, which holds `models`; the first one is the default."""
    with (
        FakeEngine(f"ipc://{folder}/{uuid.uuid4().hex[:8]}", models=models) as engine,
        served_client(config, engine) as client,
    ):
        yield client


@pytest.fixture
def serve() -> Callable[..., contextlib.AbstractContextManager[tuple[str, uvicorn.Server]]]:
    return serving


@pytest.fixture(scope="session")
def folder() -> Iterator[pathlib.Path]:
    path = tempfile.mkdtemp(prefix="noria")  # pytest's own are too long for the path of a socket
    yield pathlib.Path(path)
    shutil.rmtree(path)


@pytest.fixture
def new_engine(folder: pathlib.Path) -> Iterator[Callable[..., FakeEngine]]:
    """Starts engines for this test only."""
    engines: list[FakeEngine] = []

    def make(state: FakeEngineState = "ready", **options: Any) -> FakeEngine:
        engines.append(FakeEngine(f"ipc://{folder}/{uuid.uuid4().hex[:8]}", state, **options))
        return engines[-1]

    yield make
    for engine in engines:
        engine.stop()


def run_in_pool(engine: FakeEngine, scenario: Callable[[EnginePool], Coroutine[Any, Any, None]]) -> None:
    """Run `scenario` with a pool of one engine, which is ready."""

    async def run() -> None:
        async with EnginePool([engine.address]) as pool:
            await wait_until_async(lambda: pool.ready)
            await scenario(pool)

    asyncio.run(run())


@dataclass(frozen=True)
class FrontendProcess:
    """A front end that is ready, and what it logs."""

    port: int
    metrics_port: int
    process: psutil.Process
    log: pathlib.Path

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), 60)

    @property
    def resident_bytes(self) -> int:
        return self.process.memory_info().rss


@pytest.fixture(scope="module")
def frontend_process(folder: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrontendProcess]:
    """A front end as the supervisor starts it, whose /metrics are on a port of their own. It may open 256 files.

    The tests of a file share it: a start costs two seconds.
    """
    with (
        FakeEngine(f"ipc://{folder}/{uuid.uuid4().hex[:8]}") as engine,
        running_frontend(engine, tmp_path_factory.mktemp("frontend")) as frontend,
    ):
        yield frontend


@contextlib.contextmanager
def running_frontend(
    engine: FakeEngine, tmp_path: pathlib.Path, config: FrontendConfig = DEFAULT_FRONTEND, max_files: int = 256
) -> Iterator[FrontendProcess]:
    """A front end as of `frontend_process`, with the settings of `config` but for its addresses."""
    metrics = tmp_path / "metrics"
    metrics.mkdir()
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_server(("127.0.0.1", 0)) as metrics_listener,
        (tmp_path / "log").open("wb") as log,
    ):
        fds = [listener.fileno(), metrics_listener.fileno()]
        settings = Config(data_dir=str(tmp_path / "data"), frontend=config)
        task = FrontendTask(settings, fds[0], [engine.address], metrics_fd=fds[1])
        child = subprocess.Popen(
            [sys.executable, "-m", "noria.frontend.process", msgspec.json.encode(task).decode()],
            pass_fds=fds,
            stdout=log,
            stderr=log,
            env=os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(metrics)},
        )
        resource.prlimit(child.pid, resource.RLIMIT_NOFILE, (max_files, max_files))
        ports = [each.getsockname()[1] for each in (listener, metrics_listener)]
    with child:
        try:
            wait_until_ready(f"{'https' if config.ssl_certfile else 'http'}://127.0.0.1:{ports[0]}")
            yield FrontendProcess(*ports, psutil.Process(child.pid), tmp_path / "log")
        finally:
            child.kill()
