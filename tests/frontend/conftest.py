"""A real front end on a loopback port, in front of a fake engine."""

import contextlib
import json
import logging
import pathlib
import shutil
import socket
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import httpx
import msgspec
import pytest
import uvicorn
from opentelemetry.trace import Tracer

from noria.config import Config, FrontendConfig
from noria.frontend.app import build_app
from noria.frontend.engines.pool import EnginePool
from noria.frontend.process import http_server
from noria.observe.traces.tracer import GLOBAL_TRACER
from noria.protocol.diffusion import DiffusionModelSpec
from noria.testing.fake_engine import FAKE_MODEL, FakeEngine, FakeEngineState
from waiting import wait_until


@contextlib.contextmanager
def serving(
    config: Config, engine: FakeEngine, tracer: Tracer = GLOBAL_TRACER, restart_wait_s: float = 60.0
) -> Iterator[tuple[str, uvicorn.Server]]:
    """A front end's address and its server, which stops at the end of the context or when `should_exit` is set.

    Its data folder is its own unless `config` names one, so that no other test's front end runs its jobs.
    """
    with tempfile.TemporaryDirectory(prefix="noria-data") as data_dir:
        own = config if config.data_dir != "auto" else msgspec.structs.replace(config, data_dir=data_dir)
        with _serving(own, engine, tracer, restart_wait_s) as served:
            yield served


@contextlib.contextmanager
def _serving(
    config: Config, engine: FakeEngine, tracer: Tracer, restart_wait_s: float
) -> Iterator[tuple[str, uvicorn.Server]]:
    engine_pool = EnginePool([engine.address], restart_wait_s=restart_wait_s)
    server = http_server(build_app(config, engine_pool, tracer=tracer), engine_pool, config.frontend)
    listener = socket.create_server(("127.0.0.1", 0))
    host, port = listener.getsockname()
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://{host}:{port}", server
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture
def serve() -> Callable[..., contextlib.AbstractContextManager[tuple[str, uvicorn.Server]]]:
    return serving


@pytest.fixture(scope="session")
def folder() -> Iterator[pathlib.Path]:
    path = tempfile.mkdtemp(prefix="noria")  # pytest's own are too long for the path of a socket
    yield pathlib.Path(path)
    shutil.rmtree(path)


@pytest.fixture
def captured_log_fields(
    caplog: pytest.LogCaptureFixture,
) -> Callable[..., contextlib.AbstractContextManager[Callable[[], list[dict]]]]:
    """Captures the fields of the lines that a logger writes within a context."""

    @contextlib.contextmanager
    def capture(logger: str, level: int = logging.INFO) -> Iterator[Callable[[], list[dict]]]:
        with caplog.at_level(level, logger):
            yield lambda: [dict(record.noria_fields) for record in list(caplog.records) if record.name == logger]

    return capture


@pytest.fixture(scope="session")
def spec() -> DiffusionModelSpec:
    return FAKE_MODEL


@pytest.fixture
def new_engine(folder: pathlib.Path) -> Iterator[Callable[..., FakeEngine]]:
    """Starts engines for this test only."""
    engines: list[FakeEngine] = []

    def make(state: FakeEngineState = "ready") -> FakeEngine:
        engines.append(FakeEngine(f"ipc://{folder}/{uuid.uuid4().hex[:8]}", state))
        return engines[-1]

    yield make
    for engine in engines:
        engine.stop()


@pytest.fixture(scope="session")
def shared_engine(folder: pathlib.Path) -> Iterator[FakeEngine]:
    engine = FakeEngine(f"ipc://{folder}/engine")
    wait_until((folder / "engine").exists)  # its thread binds it
    yield engine
    engine.stop()


@pytest.fixture(scope="session")
def url(shared_engine: FakeEngine) -> Iterator[str]:
    """The address of the session's front end."""
    config = Config(frontend=FrontendConfig(max_body_bytes=4096, max_images=4, max_steps=100, max_prompt_chars=200))
    with serving(config, shared_engine) as (address, _):
        yield address


@pytest.fixture(scope="session")
def web(url: str) -> Iterator[httpx.Client]:
    # loading certificates takes longer than a test
    with httpx.Client(base_url=url, timeout=60, verify=False) as client:
        yield client


@pytest.fixture
def engine(shared_engine: FakeEngine, web: httpx.Client) -> Iterator[FakeEngine]:
    """The session's engine, ready and reset."""
    wait_until(lambda: web.get("/readyz").status_code == 200)
    shared_engine.reset()
    yield shared_engine
    shared_engine.reset()
    shared_engine.set_state("ready")
    wait_until(lambda: web.get("/readyz").status_code == 200)


@pytest.fixture
def post_and_disconnect(url: str, engine: FakeEngine) -> Callable[..., None]:
    """Posts a request, and closes the connection once the engine has it; a client's time-out might come earlier."""

    def post(path: str, body: object, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        engine.never_answers = True
        content, host = json.dumps(body).encode(), httpx.URL(url)
        names = {"Host": "x", "Content-Type": "application/json", "Content-Length": str(len(content)), **headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in names.items())
        with socket.create_connection((host.host, host.port), 60) as connection:
            connection.sendall(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + content)
            wait_until(lambda: engine.submitted)
            assert engine.cancelled == []
        wait_until(lambda: engine.cancelled)
        assert engine.cancelled == [request.attempt_id for request in engine.submitted]

    return post


@pytest.fixture
def client(web: httpx.Client, engine: FakeEngine) -> httpx.Client:
    return web
