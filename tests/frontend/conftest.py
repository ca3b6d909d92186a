"""A real front end on a loopback port, in front of a fake engine."""

import contextlib
import json
import logging
import pathlib
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import httpx
import openai
import pytest

from extras_client import upscaling_server  # noqa: F401 - a fixture
from frontends import folder, new_engine, serve, served_models, serving  # noqa: F401 - fixtures
from noria.config import Config, FrontendConfig
from noria.protocol.diffusion import DiffusionModelSpec
from noria.testing.fake_encoder import FAKE_ENCODER, IMAGES
from noria.testing.fake_engine import FAKE_MODEL, FakeEngine
from waiting import wait_until


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


@pytest.fixture(scope="session")
def shared_engine(folder: pathlib.Path) -> Iterator[FakeEngine]:  # noqa: F811 - a fixture
    engine = FakeEngine(f"ipc://{folder}/engine")
    wait_until((folder / "engine").exists)  # its thread binds it
    yield engine
    engine.stop()


@pytest.fixture(scope="session")
def url(shared_engine: FakeEngine) -> Iterator[str]:
    """The address of the session's front end."""
    config = Config(frontend=FrontendConfig(max_body_bytes=4096, max_images=4, max_steps=100, max_prompt_chars=200))
    # Ten seconds later, in another test, it logs how many requests it rejected.
    audit, name = logging.getLogger("noria.keys"), "shared front end"
    audit.addFilter(lambda _: threading.current_thread().name != name)
    with serving(config, shared_engine, name=name) as (address, _):
        yield address
    audit.filters.clear()


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
    """Posts a request and `then` more bytes; disconnects once the engine has it, as no client's time-out can."""

    def post(path: str, body: object, headers: Mapping[str, str] = MappingProxyType({}), then: bytes = b"") -> None:
        engine.never_answers = True
        content, host = json.dumps(body).encode(), httpx.URL(url)
        names = {
            "Host": "localhost",
            "Content-Type": "application/json",
            "Content-Length": str(len(content)),
            **headers,
        }
        head = "".join(f"{name}: {value}\r\n" for name, value in names.items())
        with socket.create_connection((host.host, host.port), 60) as connection:
            connection.sendall(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + content + then)
            wait_until(lambda: engine.submitted)
            assert engine.cancelled == []
        wait_until(lambda: engine.cancelled)
        assert engine.cancelled == [request.attempt_id for request in engine.submitted]

    return post


@pytest.fixture
def client(web: httpx.Client, engine: FakeEngine) -> httpx.Client:
    return web


@pytest.fixture
def openai_client(client: httpx.Client) -> openai.OpenAI:
    """OpenAI's unmodified client of the session's front end."""
    return openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="none", http_client=client, max_retries=0)


@pytest.fixture(scope="session")
def shared_texts(folder: pathlib.Path) -> Iterator[httpx.Client]:  # noqa: F811 - a fixture
    config = Config(frontend=FrontendConfig(max_texts=8, max_body_bytes=600_000))
    with served_models(folder, FAKE_MODEL, FAKE_ENCODER, IMAGES, config=config) as client:
        yield client


@pytest.fixture
def texts(shared_texts: httpx.Client) -> httpx.Client:
    """A client of a server of an image model and two encoders; the engine behind it is reset."""
    shared_texts.engine.reset()
    return shared_texts
