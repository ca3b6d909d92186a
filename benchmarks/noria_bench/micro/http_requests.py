"""Measures the CPU time that a front end spends on one HTTP request, in milliseconds. Needs no device.

    python -m noria_bench.micro.http_requests [SECONDS]
    python -m noria_bench.micro.http_requests split [SECONDS]

A real front-end process with its log and metrics files, in front of a fake engine that answers at once; 16 connections
of one client, each with one request at a time. `served` has no image file: writing it is replaced by an empty one. A
text is split into words instead of tokens. Each number is that of the quietest of many batches, since other load on the
machine slows down the caches.

`split` measures what the parts of an embedding take: front ends that each lack one part get the same batches in turn,
and a part's time is the median of how much less the one without it takes. Its times compare with each other only.
"""

import contextlib
import json
import os
import pathlib
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator

import msgspec

from noria.config import Config
from noria.observe.logs.setup import child_log_environment, new_mark
from noria.protocol.process_signals import STOP_SIGNAL
from noria.protocol.tasks import FrontendTask
from noria.testing.fake_encoder import FAKE_ENCODER
from noria.testing.fake_engine import FAKE_MODEL, FakeEngine

NUM_CONNECTIONS, NUM_ROUNDS = 16, 20  # connections, and rounds of a batch
# Writes no image file, and splits texts at spaces.
FRONTEND = """
from noria.frontend import app, process
from noria.frontend.services.images import generation
from noria.testing.fake_encoder import FakeTokenizer
generation.write_images = lambda images, *_: [b""] * len(images)
app._load_tokenizer = FakeTokenizer
"""
# What a front end is without: statements that take the place of a part.
PARTS = {
    "all above uvicorn": """
from noria.frontend.http.middleware import ObservabilityMiddleware as middleware
async def answer(self, scope, receive, send):
    if scope["type"] != "http" or scope["method"] == "GET":
        return await call(self, scope, receive, send)
    await receive()
    headers = [(b"content-type", b"application/json"), (b"content-length", b"300")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": b" " * 300})
call, middleware.__call__ = middleware.__call__, answer
""",
    "EncodingService.encode": """
from noria.frontend.services.texts.encoding import EncodingService
from noria.frontend.services.texts.encoding_result import EncodingResult, EncodingTimings
from noria.models.encoder.tokenizers.tokens import TokenizedText
from noria.observe.logs.request_log import RequestLogRecord
from noria.testing.fake_encoder import FAKE_ENCODER
numbers, text = memoryview(bytes(32)).cast("f"), TokenizedText(5, b"")
async def encode(*_):
    timings = EncodingTimings(0.1, 0.1, 0.1, 0.3, 0.2)
    return EncodingResult(FAKE_ENCODER, numbers, 1, 8, [text], 5, 0, timings, 1.0, RequestLogRecord())
EncodingService.encode = encode
""",
    "  the tokenizer's thread": """
import asyncio
from noria.frontend.services.texts.tokenization import TokenizationThread
def tokenize(self, spec, inputs, side="right"):
    outcome = asyncio.get_running_loop().create_future()
    outcome.set_result(self._tokenizer(spec).encode(inputs, side))
    return outcome
TokenizationThread.tokenize = tokenize
""",
    "  the engine's channel": """
from noria.frontend.engines.client import EngineClient
from noria.frontend.engines.results import EngineResult
from noria.protocol.text import TextResult, TextTimings
async def submit(*_, **__):
    return EngineResult((), TextTimings(0.1, 0.1), 1, 1.0, 0.2, TextResult(1, 8), memoryview(bytes(32)))
EngineClient.submit = submit
""",
    "the log line": """
from noria.observe.logs.request_log import RequestLogRecord
RequestLogRecord.write = lambda self, **values: None
""",
    "metrics": """
import contextlib
from noria.frontend.http import middleware
from noria.frontend.services.texts import encoding
from noria.observe.metrics import declarations, outcomes
class NoMetric:
    inc = observe = staticmethod(lambda amount=0: None)
encoding._record_metrics = outcomes.count_request = lambda *_: None
middleware._series = lambda *_: (NoMetric, NoMetric)
declarations.REQUESTS_IN_FLIGHT.track_inprogress = contextlib.nullcontext
""",
    "spans": """
from opentelemetry.trace import INVALID_SPAN
from noria.frontend.http import request_spans
from noria.frontend.services.texts import encoding
request_spans.begin = lambda *_: INVALID_SPAN
encoding.current_trace = dict
""",
}


def request(method: str, path: str, body: object = None) -> bytes:
    """Return a request as curl sends it."""
    content = b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:8000\r\nUser-Agent: curl/8.14.1\r\nAccept: */*\r\n"
    if body is not None:
        head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
    return head.encode() + b"\r\n" + content


REQUESTS = {
    "GET /healthz": (b"200", request("GET", "/healthz")),
    "rejected POST /t2i": (b"400", request("POST", "/t2i", {"prompt": "a red circle", "inference_steps": 5000})),
    "served POST /t2i": (b"200", request("POST", "/t2i", {"prompt": "a red circle", "inference_steps": 5})),
    "POST /v1/embeddings": (b"200", request("POST", "/v1/embeddings", {"input": "a red circle"})),
}

READY = request("GET", "/readyz")


@contextlib.contextmanager
def running_frontend(folder: pathlib.Path, engine_address: str, without: str = "") -> Iterator[tuple[int, int]]:
    """Start a front end as the supervisor does, after the statements `without`; yields its process id and its port."""
    (folder / "metrics").mkdir(parents=True)
    listener = socket.create_server(("127.0.0.1", 0))
    task = FrontendTask(Config(data_dir=str(folder)), listener.fileno(), [engine_address])
    environment = os.environ | child_log_environment(new_mark()) | {"PROMETHEUS_MULTIPROC_DIR": str(folder / "metrics")}
    command = [sys.executable, "-c", f"{FRONTEND}{without}\nprocess.main()", msgspec.json.encode(task).decode()]
    with subprocess.Popen(command, pass_fds=[listener.fileno()], stderr=subprocess.PIPE, env=environment) as child:
        assert child.stderr is not None
        threading.Thread(target=child.stderr.read, daemon=True).start()  # the supervisor reads it, too
        try:
            yield child.pid, listener.getsockname()[1]
        finally:
            child.send_signal(STOP_SIGNAL)


def cpu_s(pid: int) -> float:
    """The CPU time of a process and its threads, in seconds, as clock_getcpuclockid(3) has it."""
    return time.clock_gettime((~pid << 3) | 2)


def receive(connection: socket.socket) -> bytes:
    """Receive one response with a Content-Length; returns its status."""
    response = connection.recv(65_536)
    head, _, body = response.partition(b"\r\n\r\n")
    missing = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]) - len(body)
    while missing:
        missing -= len(connection.recv(missing))
    return response[9:12]


def send_batch(connections: list[socket.socket], content: bytes, status: bytes) -> None:
    """Send `NUM_ROUNDS` requests on each connection, one at a time; all must be answered with `status`."""
    for _ in range(NUM_ROUNDS):
        for connection in connections:
            connection.sendall(content)
        # The last one first: the client is woken once, and each wake-up of a client costs the front end time.
        for connection in reversed(connections):
            assert (got := receive(connection)) == status, got


def measure(seconds: float) -> dict[str, float]:
    """Milliseconds of CPU time of each kind of request, in the quietest batch, and of each idle second."""
    least = dict.fromkeys(REQUESTS, float("inf"))
    with tempfile.TemporaryDirectory(prefix="noria") as name, contextlib.ExitStack() as stack:
        engine = stack.enter_context(FakeEngine(f"ipc://{name}/engine", models=(FAKE_MODEL, FAKE_ENCODER)))
        pid, port = stack.enter_context(running_frontend(pathlib.Path(name), engine.address))
        connections = _connect(stack, port)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for kind, (status, content) in REQUESTS.items():
                least[kind] = min(least[kind], _batch_ms(pid, connections, content, status))
            engine.reset()  # it keeps its messages
        for connection in connections:
            connection.close()
        least["idle, each second"] = _idle_ms_per_s(pid)
    return least


def _connect(stack: contextlib.ExitStack, port: int) -> list[socket.socket]:
    """Return connections to a front end that is ready."""
    connections = [stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(NUM_CONNECTIONS)]
    connections[0].sendall(READY)
    while receive(connections[0]) != b"200":
        time.sleep(0.1)
        connections[0].sendall(READY)
    return connections


def _batch_ms(pid: int, connections: list[socket.socket], content: bytes, status: bytes) -> float:
    """Milliseconds of CPU time of each request of a batch."""
    before = cpu_s(pid)
    send_batch(connections, content, status)
    return 1e3 * (cpu_s(pid) - before) / (NUM_CONNECTIONS * NUM_ROUNDS)


def split(seconds: float) -> dict[str, float]:
    """Milliseconds of CPU time of an embedding, and of its parts; medians."""
    status, content = REQUESTS["POST /v1/embeddings"]
    with tempfile.TemporaryDirectory(prefix="noria") as name, contextlib.ExitStack() as stack:
        engine = stack.enter_context(FakeEngine(f"ipc://{name}/engine", models=(FAKE_MODEL, FAKE_ENCODER)))
        frontends = {}
        for number, (part, without) in enumerate({"": "", **PARTS}.items()):
            started = running_frontend(pathlib.Path(name) / str(number), engine.address, without)
            pid, port = stack.enter_context(started)
            frontends[part] = pid, _connect(stack, port)
        used_ms: dict[str, list[float]] = {part: [] for part in frontends}
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for part in random.sample(list(frontends), len(frontends)):
                used_ms[part].append(_batch_ms(*frontends[part], content, status))
            engine.reset()
        for _, connections in frontends.values():
            for connection in connections:
                connection.close()
    whole = used_ms.pop("")
    return {"an embedding": statistics.median(whole)} | {
        part: statistics.median(all_ms - rest_ms for all_ms, rest_ms in zip(whole, others, strict=True))
        for part, others in used_ms.items()
    }


def _idle_ms_per_s(pid: int) -> float:
    """Milliseconds of CPU time that an idle front end takes each second, in the quietest of five times 2 s."""
    least = float("inf")
    for _ in range(5):
        before = cpu_s(pid)
        time.sleep(2.0)
        least = min(least, 1e3 * (cpu_s(pid) - before) / 2.0)
    return least


def main() -> None:
    """Print the cost of each kind of request."""
    arguments = sys.argv[1:]
    run = split if arguments[:1] == ["split"] else measure
    seconds = float(arguments[-1]) if arguments and arguments != ["split"] else 20.0
    for kind, used_ms in run(seconds).items():
        print(f"{kind:24} {used_ms:.3f} ms")


if __name__ == "__main__":
    main()
