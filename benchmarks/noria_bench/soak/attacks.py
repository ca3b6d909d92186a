"""Attacks of hostile clients on a server: each runs against a loopback port until its event is set.

None needs a key, and each has a limit of docs/security.md against it.
"""

import contextlib
import functools
import http.client
import itertools
import json
import random
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType

from noria_bench.load.closed_loop import HEADERS
from noria_bench.soak.image_files import HOSTILE_FILES

Attack = Callable[[int, threading.Event], None]

START = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = (
    b"POST /t2i HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nExpect: 100-continue\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
ENDLESS_HEADS: Mapping[str, tuple[bytes, bytes]] = MappingProxyType(
    {
        "many short fields": (START, b"a:b\r\n"),
        "a long value": (START + b"a: ", b"v"),
        "a long name": (START, b"n"),
        "a long URL": (b"GET /", b"u"),
        "many trailers": (CHUNKED + b"0\r\n", b"a:b\r\n"),
        "a long trailer": (CHUNKED + b"0\r\na: ", b"v"),
        "a long chunk extension": (CHUNKED + b"1;", b"e"),
    }
)
"""The beginning of a request, and what continues it without end."""

_SOURCE = ("127.0.0.2", 0)  # another client than those of 127.0.0.1, which have their own shares
_TIMEOUT_S = 60.0
_PIECE_BYTES = 2**18


def begin(client: socket.socket, start: bytes) -> None:
    """Send `start`; what follows a complete head is sent when the server reads the body."""
    head, end, body = start.partition(b"\r\n\r\n")
    client.sendall(head + end)
    if end:
        assert client.recv(4096).startswith(b"HTTP/1.1 100 ")
        client.sendall(body)


def send_endlessly(client: socket.socket, start: bytes, repeated: bytes, max_bytes: int) -> int:
    """Send up to `max_bytes`; return how many were accepted before the connection was closed."""
    piece = repeated * (_PIECE_BYTES // len(repeated))
    begin(client, start)
    num_sent = 0
    with contextlib.suppress(ConnectionError):
        while num_sent < max_bytes:
            num_sent += client.send(piece)
    return num_sent


def heads_without_end(port: int, stopped: threading.Event) -> None:
    """Send heads of 4 MB of all shapes, one after the other."""
    for start, repeated in itertools.cycle(ENDLESS_HEADS.values()):
        if stopped.is_set():
            return
        with contextlib.suppress(OSError, AssertionError), connect(port) as client:
            send_endlessly(client, start, repeated, 2**22)


def idle_connections(port: int, stopped: threading.Event) -> None:
    """Hold 200 connections, half of them with the beginning of a head."""
    hold(port, stopped, (START if number % 2 else b"" for number in range(200)))


def unfinished_bodies(port: int, stopped: threading.Event) -> None:
    """Hold 40 requests whose bodies of 1 MB never end."""
    hold(port, stopped, [_post_head("/t2i", 1_000_000) + b" " * 500_000] * 40)


def small_bodies_that_stop(port: int, stopped: threading.Event) -> None:
    """Hold 300 requests whose small bodies end after a byte."""
    hold(port, stopped, [_post_head("/t2i", 60_000) + b"{"] * 300)


def pipelined_requests(port: int, stopped: threading.Event) -> None:
    """Send up to 4 MB of requests on a connection without reading a response, again and again."""
    while not stopped.is_set():
        with contextlib.suppress(OSError), connect(port) as client:
            client.settimeout(1.0)
            send_endlessly(client, b"", START + b"\r\n", 2**22)


def unread_responses(port: int, stopped: threading.Event) -> None:
    """Request a page 64 times on each of 16 connections, and read nothing."""
    hold(port, stopped, [_get_head("/openapi.json") * 64] * 16)


def image_files(port: int, stopped: threading.Event) -> None:
    """Upload hostile files of all kinds, the most of 16 MB, one after the other."""
    for file in itertools.cycle(_hostile_files()):
        if stopped.is_set():
            return
        _post(port, "/v1/images/metadata", file, "image/png")


@functools.cache  # a quiet client in this process would wait while they are made
def _hostile_files() -> tuple[bytes, ...]:
    return tuple(make() for make in HOSTILE_FILES.values())


def deep_json(port: int, stopped: threading.Event) -> None:
    """Post values and nesting that no schema has."""
    values = [f"{'[' * depth}{']' * depth}" for depth in (40, 971, 5000)] + [
        "1" + "0" * 5000,
        '"' + "x" * 900_000 + '"',
    ]
    for value in itertools.cycle(values):
        if stopped.is_set():
            return
        for path in ("/t2i", "/sdapi/v1/txt2img"):
            _post(port, path, f'{{"prompt": "p", "unknown": {value}}}'.encode(), "application/json")


def large_numbers(port: int, stopped: threading.Event) -> None:
    """Post integers of thousands of digits, whose products have more, and put them into queries."""
    zeros = "0" * 4000
    while not stopped.is_set():
        _post(port, "/t2i", f'{{"prompt": "p", "n": 1{zeros}, "seed": 1{zeros}}}'.encode(), "application/json")
        batch = f'{{"prompt": "p", "batch_size": 1{zeros}, "n_iter": 1{zeros}}}'.encode()
        _post(port, "/sdapi/v1/txt2img", batch, "application/json")
        _request(port, "GET", f"/v1/jobs?limit=1{zeros}")


def foreign_pages(port: int, stopped: threading.Event) -> None:
    """Send requests as a page of another name does: to a Host that is not the server's, and from another Origin."""
    body, other = b'{"prompt": "p"}', itertools.count()
    while not stopped.is_set():
        name = f"page{next(other)}.example"  # a new name each time, so that no log line stands for two
        for fields in ({"Host": name}, {"Origin": f"http://{name}"}):
            _request(port, "POST", "/t2i", body, "application/json", fields)


def lineage_events(port: int, stopped: threading.Event) -> None:
    """Send events of 100 datasets to one run, until they are rejected, and go on."""
    datasets = [{"namespace": "attack", "name": f"dataset-{number}"} for number in range(100)]
    event = {
        "eventType": "RUNNING",
        "eventTime": "2026-01-01T00:00:00Z",
        "producer": "https://attack.example",
        "schemaURL": "https://openlineage.io/spec/2-0-2/OpenLineage.json#/$defs/RunEvent",
        "run": {"runId": "01890000-0000-7000-8000-000000000000"},
        "job": {"namespace": "attack", "name": "attack"},
        "inputs": datasets,
    }
    body = json.dumps(event).encode()
    while not stopped.is_set():
        _post(port, "/api/v1/lineage", body, "application/json")


def abandoned_samplers(port: int, stopped: threading.Event) -> None:
    """Request ever new combinations of scheduler and steps, and leave at once."""
    chooser = random.Random(1)
    while not stopped.is_set():
        scheduler = chooser.choice(("ddim", "euler", "heun", "pndm", "unipc", "dpm++2m", "dpm++2m-karras", "lms"))
        body = json.dumps({"prompt": "p", "scheduler": scheduler, "inference_steps": chooser.randint(50, 100)}).encode()
        with contextlib.suppress(OSError), connect(port) as client:
            client.sendall(_post_head("/t2i", len(body)) + body)
            stopped.wait(0.02)  # so that it reaches the engine


def event_streams(port: int, stopped: threading.Event) -> None:
    """Open streams of /v1/live beyond the limit of one client, again and again."""
    while not stopped.is_set():
        hold(port, stopped, [_get_head("/v1/live")] * 40, 2.0)


def job_streams(port: int, stopped: threading.Event) -> None:
    """Open streams of a job's events beyond the limit of one client, again and again."""
    job = _start_job(port, prompt="p", n=16, inference_steps=100, priority="low")
    while not stopped.is_set():
        hold(port, stopped, [_get_head(f"/v1/jobs/{job}/events")] * 80, 0.2)
    _request(port, "DELETE", f"/v1/jobs/{job}")


def job_pages(port: int, stopped: threading.Event) -> None:
    """Read pages of 100 jobs with long prompts, which are cancelled at once; those of the last attack suffice."""
    while not stopped.is_set():
        page = json.loads(_request(port, "GET", "/v1/jobs?limit=100") or "{}").get("results", ())
        for _ in range(100 - len(page)):
            _request(port, "DELETE", f"/v1/jobs/{_start_job(port, prompt='p' * 4000, priority='low')}")


def tarpit_webhooks(port: int, stopped: threading.Event) -> None:
    """Have the ends of jobs delivered to a receiver that never answers; the server must allow private addresses."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as tarpit:
        url = f"http://127.0.0.1:{tarpit.getsockname()[1]}/"
        while not stopped.is_set():
            _request(port, "DELETE", f"/v1/jobs/{_start_job(port, webhook=url, prompt='p', priority='low')}")


ATTACKS: Mapping[str, Attack] = MappingProxyType(
    {
        attack.__name__.replace("_", " "): attack
        for attack in (
            heads_without_end,
            idle_connections,
            unfinished_bodies,
            small_bodies_that_stop,
            pipelined_requests,
            unread_responses,
            image_files,
            deep_json,
            large_numbers,
            foreign_pages,
            abandoned_samplers,
            event_streams,
            job_streams,
            job_pages,
        )
    }
)
"""By name, those that any server can withstand for hours: deliveries and events of the others are kept for days."""


@contextlib.contextmanager
def connect(port: int) -> Iterator[socket.socket]:
    """Yield a connection to a loopback port, from the attackers' address."""
    with socket.create_connection(("127.0.0.1", port), _TIMEOUT_S, _SOURCE) as client:
        yield client


def hold(port: int, stopped: threading.Event, contents: Iterable[bytes], seconds: float | None = None) -> None:
    """Send each of `contents` on a connection of its own; hold all for `seconds` (None: any time), or until the end."""
    with contextlib.ExitStack() as opened:
        for content in contents:
            with contextlib.suppress(OSError):
                opened.enter_context(connect(port)).sendall(content)
        stopped.wait(seconds)


def _get_head(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


def _post_head(path: str, num_bytes: int) -> bytes:
    fields = f"Host: localhost\r\nContent-Type: application/json\r\nContent-Length: {num_bytes}"
    return f"POST {path} HTTP/1.1\r\n{fields}\r\n\r\n".encode()


def _start_job(port: int, webhook: str | None = None, **settings: object) -> str:
    """Return the id of a new job; that of none if it is rejected."""
    body = {"input": settings} | ({} if webhook is None else {"webhook": webhook})
    answer = _request(port, "POST", "/v1/jobs", json.dumps(body).encode(), "application/json")
    return str(json.loads(answer or "{}").get("id", "none"))


def _post(port: int, path: str, body: bytes, content_type: str) -> None:
    _request(port, "POST", path, body, content_type)


def _request(
    port: int,
    method: str,
    path: str,
    body: bytes = b"",
    content_type: str = "application/json",
    fields: Mapping[str, str] = MappingProxyType({}),
) -> bytes:
    """Return the body of the response; empty if there is none."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S, source_address=_SOURCE)
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.request(method, path, body or None, {**HEADERS, "content-type": content_type, **fields})
        return connection.getresponse().read()
    return b""
