"""A real front end on a loopback port, before an engine that is fake but for its channel."""

import contextlib
import json
import logging
import pathlib
import queue
import shutil
import socket
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

import httpx
import msgspec
import pytest
import uvicorn

import waiting
from noria.config import Config, FrontendConfig
from noria.frontend.app import build_app
from noria.frontend.engines.pool import EnginePool
from noria.frontend.process import http_server
from noria.observe.traces.tracer import NO_TRACER, Tracer
from noria.protocol.messages import (
    Cancel,
    EngineLoad,
    EngineState,
    EngineView,
    Failed,
    Finished,
    FromEngine,
    Hello,
    ImageDone,
    LoadAck,
    Preview,
    Progress,
    ShapeCosts,
    Submit,
    Timings,
    ViewRequest,
)
from noria.protocol.model_spec import ModelSpec
from noria.protocol.request import ImageRequest
from noria.protocol.transport import EngineChannel

SPEC = ModelSpec(
    name="tiny",
    folder="/nowhere",
    fingerprint="0123456789ab",
    pipeline="StableDiffusionPipeline",
    prediction_type="epsilon",
    default_width_px=64,
    default_height_px=48,
    min_side_px=16,
    max_side_px=128,
    multiple_px=8,
    default_scheduler="ddim",
    schedulers=("ddim", "euler", "pndm"),
    default_steps=12,
    default_guidance=6.5,
    num_parameters=1000,
)


LOAD = EngineLoad(1.5, 2, 3, 4, (ShapeCosts("tiny", 64, 48, {1: 0.01, 2: 0.015}, {1: 0.002}, 0.001, 8),))


class FakeEngine:
    """Answers at once with flat colours of the seed, unless told otherwise by one of its fields."""

    def __init__(self, address: str, state: str = "ready") -> None:
        """`state` is what the first to ask is told; `become` changes it a moment later."""
        self.address = address
        self._first_state = state
        self._commands: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self.reset()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def reset(self) -> None:
        self.submitted: list[ImageRequest] = []
        self.cancelled: list[str] = []
        self.num_load_acks = 0  # of its loads
        self.view_requests: list[ViewRequest] = []
        self.make_view: Callable[[ViewRequest, str], tuple[EngineView, bytes | None] | None] = lambda _follow, _life: (
            None
        )
        self.hello_names: list[str] = []  # by these names
        self.never_answers = False  # answer nothing
        self.sends_no_images = False  # answer with steps and previews, and no image
        self.failure: dict[str, object] | None = None  # the fields of its `Failed`
        self.crash_seed: int | None = None  # die of this seed, with all that is submitted within 0.1 s
        self.answers_cancel = True
        self.cancel_progress: dict[str, object] = {}  # how far it comes with what is cancelled: fields of its `Failed`
        self.sends_invalid_replies = False  # finish without having sent an image
        self.num_crashes_left = 0  # die at so many of the next submits
        self.restarts = True  # start again after such a death
        self.exit_cause = "crashed"  # what the next life tells of the last one's end, with whom it had aboard
        self.in_flight: list[str] = []  # requests that this life keeps to itself

    @property
    def colour(self) -> Callable[[int], tuple[int, int, int]]:
        return lambda seed: (seed % 251, seed % 13, 200)

    def set_state(self, state: str) -> None:
        """Be "ready", "loading" or "dead"."""
        self._commands.put(state)

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        state, channel, clients = self._first_state, EngineChannel(self.address), set()
        run_info = (uuid.uuid4().hex, "none", ())
        while not self._stopped.is_set():
            with contextlib.suppress(queue.Empty):
                state = self._commands.get_nowait()
                if state == "dead":
                    channel.close()
                    while state == "dead" and not self._stopped.is_set():
                        with contextlib.suppress(queue.Empty):
                            state = self._commands.get(timeout=0.02)
                    channel, clients = EngineChannel(self.address), set()
                    run_info, self.in_flight = (uuid.uuid4().hex, self.exit_cause, tuple(self.in_flight)), []
                for client in clients:
                    channel.send(client, _state_message(state, run_info))
            try:
                client, message = channel.inbox.get(timeout=0.01)
            except queue.Empty:
                continue
            match message:
                case Hello(name=name):
                    self.hello_names.append(name)
                    clients.add(client)
                    channel.send(client, _state_message(state, run_info))
                    channel.send(client, LOAD)
                case LoadAck():
                    self.num_load_acks += 1
                case ViewRequest():
                    self.view_requests.append(message)
                    if (answer := self.make_view(message, run_info[0])) is not None:
                        channel.send(client, *answer)
                case Cancel(request_id=request_id):
                    self._cancel(channel, client, request_id)
                case Submit(request=request):
                    self._submit(channel, client, request)
        channel.close()

    def _cancel(self, channel: EngineChannel, client: bytes, request_id: str) -> None:
        self.cancelled.append(request_id)
        if self.answers_cancel:
            channel.send(client, Failed(request_id, "cancelled", "cancelled", **self.cancel_progress))

    def _submit(self, channel: EngineChannel, client: bytes, request: ImageRequest) -> None:
        """All is decided before it is in `submitted`: who sees it there may say at once what shall become of the next."""
        crashes = self._crashes_on(request)
        withholds = crashes or self.never_answers
        replies = list(self._replies(request, withholds))
        if withholds:
            self.in_flight.append(request.request_id)
        if crashes:
            self.set_state("dead")
            if self.restarts:
                self.set_state("ready")
        self.submitted.append(request)
        for message, *payload in replies:
            channel.send(client, message, *payload)

    def _crashes_on(self, request: ImageRequest) -> bool:
        if request.seed == self.crash_seed:
            time.sleep(0.1)
            return True
        if self.num_crashes_left == 0:
            return False
        self.num_crashes_left -= 1
        return True

    def _replies(self, request: ImageRequest, withholds: bool) -> Iterator[tuple[FromEngine, *tuple[bytes, ...]]]:
        """What it says, each with the bytes beside it; no more than that it has accepted a request that it keeps."""
        failure = self.failure
        if not failure:
            yield (Progress(request.request_id, 0, 0, request.num_steps, 0.0, 0.5),)
        if withholds:
            return
        if failure:
            yield (Failed(request.request_id, **failure),)
            return
        num_images = 0 if self.sends_invalid_replies else request.num_images
        if request.stream_progress:
            for call in range(1, request.num_steps + 1):
                yield (Progress(request.request_id, None, call, request.num_steps, 0.0, 0.1),)
        for number in range(num_images * request.num_previews):
            preview = Preview(request.request_id, number % num_images, number, 4, 3)
            yield preview, bytes(self.colour(request.seed)) * 12
        if self.sends_no_images:
            return
        for index in reversed(range(num_images)):  # images may come in any order
            seed = request.seed + index
            done = ImageDone(request.request_id, index, seed, request.width_px, request.height_px)
            yield done, bytes(self.colour(seed)) * (request.width_px * request.height_px)
        yield (Finished(request.request_id, Timings(0.001, 0.002, 0.003, 0.004), request.num_steps, 2.5),)


def _state_message(state: str, run_info: tuple[str, str, tuple[str, ...]]) -> EngineState:
    incarnation, exit_cause, in_flight = run_info
    return EngineState(incarnation, state, (SPEC,) if state == "ready" else (), "cpu", exit_cause, in_flight)


@contextlib.contextmanager
def serving(
    config: Config, engine: FakeEngine, tracer: Tracer = NO_TRACER, restart_wait_s: float = 60.0
) -> Iterator[tuple[str, uvicorn.Server]]:
    """A front end's address and the server itself, which ends with the context or at `should_exit`.

    Unless the config names a folder for its data, it has one of its own: no front end of another test draws its jobs.
    """
    with tempfile.TemporaryDirectory(prefix="noria-data") as data_dir:
        own = config if config.data_dir != "auto" else msgspec.structs.replace(config, data_dir=data_dir)
        with _serving(own, engine, tracer, restart_wait_s) as served:
            yield served


@contextlib.contextmanager
def _serving(
    config: Config, engine: FakeEngine, tracer: Tracer, restart_wait_s: float
) -> Iterator[tuple[str, uvicorn.Server]]:
    link = EnginePool([engine.address], restart_wait_s=restart_wait_s)
    server = http_server(build_app(config, link, tracer=tracer), link, config.frontend)
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


@pytest.fixture
def until() -> Callable[..., object]:
    return waiting.wait_until


@pytest.fixture
def ready() -> Callable[[str], object]:
    """Waits until the front end at an address has an engine that draws."""
    return lambda address: waiting.wait_until(
        lambda: httpx.get(f"{address}/readyz", verify=False, timeout=60).status_code == 200
    )


@pytest.fixture(scope="session")
def folder() -> Iterator[pathlib.Path]:
    path = tempfile.mkdtemp(prefix="noria")  # pytest's own are too long for a socket's name
    yield pathlib.Path(path)
    shutil.rmtree(path)


@pytest.fixture
def said_in(
    caplog: pytest.LogCaptureFixture,
) -> Callable[..., contextlib.AbstractContextManager[Callable[[], list[dict]]]]:
    """The fields of the lines that a logger writes meanwhile."""

    @contextlib.contextmanager
    def listen(logger: str, level: int = logging.INFO) -> Iterator[Callable[[], list[dict]]]:
        with caplog.at_level(level, logger):
            yield lambda: [dict(record.noria_fields) for record in list(caplog.records) if record.name == logger]

    return listen


@pytest.fixture(scope="session")
def spec() -> ModelSpec:
    return SPEC


@pytest.fixture
def new_engine(folder: pathlib.Path) -> Iterator[Callable[..., FakeEngine]]:
    """Makes engines that only this test talks to."""
    engines: list[FakeEngine] = []

    def make(state: str = "ready") -> FakeEngine:
        engines.append(FakeEngine(f"ipc://{folder}/{uuid.uuid4().hex[:8]}", state))
        return engines[-1]

    yield make
    for engine in engines:
        engine.stop()


@pytest.fixture(scope="session")
def shared_engine(folder: pathlib.Path) -> Iterator[FakeEngine]:
    engine = FakeEngine(f"ipc://{folder}/engine")
    yield engine
    engine.stop()


@pytest.fixture(scope="session")
def url(shared_engine: FakeEngine) -> Iterator[str]:
    """The address of a front end that runs for the whole session."""
    config = Config(frontend=FrontendConfig(max_body_bytes=4096, max_images=4, max_steps=100, max_prompt_chars=200))
    with serving(config, shared_engine) as (address, _):
        yield address


@pytest.fixture(scope="session")
def web(url: str) -> Iterator[httpx.Client]:
    with httpx.Client(
        base_url=url, timeout=60, verify=False
    ) as client:  # to load certificates takes longer than a test
        yield client


@pytest.fixture
def engine(shared_engine: FakeEngine, web: httpx.Client) -> Iterator[FakeEngine]:
    """The session's engine, ready, well-behaved and without memories."""
    shared_engine.reset()
    shared_engine.set_state("ready")
    waiting.wait_until(lambda: web.get("/readyz").status_code == 200)
    yield shared_engine
    shared_engine.reset()


@pytest.fixture
def post_and_leave(url: str, engine: FakeEngine) -> Callable[..., None]:
    """Posts what the engine then holds, and closes the connection when it has it: a client's own time-out might come before."""

    def leave(path: str, body: object, headers: Mapping[str, str] = MappingProxyType({})) -> None:
        engine.never_answers = True
        content, host = json.dumps(body).encode(), httpx.URL(url)
        names = {"Host": "x", "Content-Type": "application/json", "Content-Length": str(len(content)), **headers}
        head = "".join(f"{name}: {value}\r\n" for name, value in names.items())
        with socket.create_connection((host.host, host.port), 60) as connection:
            connection.sendall(f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + content)
            waiting.wait_until(lambda: engine.submitted)
            assert engine.cancelled == []
        waiting.wait_until(lambda: engine.cancelled)
        assert engine.cancelled == [request.request_id for request in engine.submitted]

    return leave


@pytest.fixture
def client(web: httpx.Client, engine: FakeEngine) -> httpx.Client:
    return web
