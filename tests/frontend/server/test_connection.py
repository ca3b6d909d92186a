"""Clients that send or read slowly or not at all, with real sockets and a real uvicorn."""

import contextlib
import socket
import subprocess
import sys
import threading
import time

import pytest
import uvicorn

from certificates import make_certificate
from noria.frontend.server import connection
from noria.frontend.server.connection import TimeoutHttpProtocol
from waiting import wait_until

SIZE = 8_000_000  # more than the kernel buffers for a client that does not read


class Server:
    """Responds with `SIZE` bytes in one piece, or at /stream in many; over TLS, or on a Unix socket, if given one."""

    def __init__(self, certificate=None, unix_path=None):
        self.certificate = certificate
        self.num_requests = self.num_finished = 0
        address, family = (("127.0.0.1", 0), socket.AF_INET) if unix_path is None else (unix_path, socket.AF_UNIX)
        self.listener = socket.create_server(address, family=family)
        config = uvicorn.Config(
            self.app,
            interface="asgi3",
            loop="uvloop",
            http=TimeoutHttpProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            timeout_keep_alive=60,
            timeout_graceful_shutdown=1,
            **(
                {}
                if certificate is None
                else {"ssl_certfile": certificate.certfile, "ssl_keyfile": certificate.keyfile}
            ),
        )
        self.uvicorn = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.uvicorn.run, kwargs={"sockets": [self.listener]})
        self.thread.start()

    async def app(self, scope, receive, send):
        self.num_requests += 1
        self.fields = scope["headers"]
        if scope["path"] in ("/small", "/late"):
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
            if scope["path"] == "/late":
                await receive()  # the rest of the request
            await send({"type": "http.response.body", "body": b"ok"})
            return
        if scope["path"].startswith("/status/"):
            status = int(scope["path"].removeprefix("/status/"))
            await send({"type": "http.response.start", "status": status})
            await send({"type": "http.response.body", "body": b"" if status in (204, 304) else b"ok"})
            return
        if scope["path"].startswith("/length/"):
            length = scope["path"].removeprefix("/length/").encode()
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", length)]})
            with pytest.raises(RuntimeError, match="not as long as its Content-Length"):
                await send({"type": "http.response.body", "body": b"ok"})
            self.num_finished += 1
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", str(SIZE).encode())]})
        pieces = 100 if scope["path"] == "/stream" else 1
        for number in range(pieces):
            body = bytes(SIZE // pieces)
            await send({"type": "http.response.body", "body": body, "more_body": number + 1 < pieces})
        self.num_finished += 1

    def connect(self):
        client = socket.socket(self.listener.family)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        client.settimeout(60)
        client.connect(self.listener.getsockname())
        if self.certificate is None:
            return client
        return self.certificate.client_context().wrap_socket(client, server_hostname="localhost")

    @property
    def num_connections(self):
        return len(self.uvicorn.server_state.connections)

    def stop(self):
        self.uvicorn.should_exit = True
        self.thread.join()


@pytest.fixture(params=["TCP", "TLS", "Unix"])
def server(request, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # pytest's own folders are too long for the path of a socket
    certificate = make_certificate(tmp_path) if request.param == "TLS" else None
    started = Server(certificate, "socket" if request.param == "Unix" else None)
    yield started
    started.stop()


def read(client, pause_s=0.0):
    """Read until the server closes the connection; return the number of bytes."""
    received = 0
    while True:
        piece = client.recv(8192)
        if not piece:
            return received
        received += len(piece)
        time.sleep(pause_s)


def receive_ok(client):
    """Receive a small response; TLS delivers its head and its body in a record each."""
    received = b""
    while not received.endswith(b"ok"):
        piece = client.recv(4096)
        assert piece, received
        received += piece


@pytest.mark.parametrize(("path", "end"), [("/", "keep-alive"), ("/stream", "close")])
def test_a_client_that_does_not_read_is_disconnected(server, path, end, monkeypatch):
    monkeypatch.setattr(connection, "STALL_TIMEOUT_S", 0.3)
    with server.connect() as client:
        client.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: {end}\r\n\r\n".encode())
        wait_until(lambda: server.num_requests == 1)
        wait_until(lambda: server.num_connections == 0 and not server.uvicorn.server_state.tasks)
        received = 0
        with contextlib.suppress(ConnectionError):
            received = read(client)
        assert received < SIZE


@pytest.mark.parametrize("path", ["/", "/stream"])
def test_a_client_that_reads_slowly_gets_the_whole_response(server, path, monkeypatch):
    checks, check = [], TimeoutHttpProtocol._on_stall_timeout

    def check_after_progress(self, previous_progress_bytes):
        # On a busy machine the client may read nothing for longer than the time-out.
        wait_until(lambda: self._progress_bytes() > previous_progress_bytes or self._unread_bytes() == 0)
        checks.append(previous_progress_bytes)
        check(self, previous_progress_bytes)

    monkeypatch.setattr(TimeoutHttpProtocol, "_on_stall_timeout", check_after_progress)
    monkeypatch.setattr(connection, "STALL_TIMEOUT_S", 0.01)  # a Unix socket has small buffers, so waits are short
    monkeypatch.setattr(connection, "MIN_READ_BYTES", 1)
    with server.connect() as client:
        client.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        assert read(client, pause_s=0.002) > SIZE
    assert checks  # it was checked and found to be reading


def test_an_unfinished_request_head_is_answered_with_408(server, monkeypatch):
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.3)
    for head in (b"GET / HTTP/1.1\r\nHost: x\r\nX-Slow: ", b"\r\n", b"G"):
        with server.connect() as client:
            client.sendall(head)
            answer = client.recv(4096)
            assert answer.startswith(b"HTTP/1.1 408 ")
            assert client.recv(1) == b""
            announced = int(answer.partition(b"content-length: ")[2].partition(b"\r\n")[0])
            assert len(answer.partition(b"\r\n\r\n")[2]) == announced


def test_a_request_has_its_fields_unless_they_are_too_many_or_too_long(server):
    with server.connect() as client:
        client.sendall(b"GET /small HTTP/1.1\r\nHost: x\r\nX-Kind: Red\r\n\r\n")
        receive_ok(client)
        assert server.fields == [(b"host", b"x"), (b"x-kind", b"Red")]
        fields = b"".join(b"A%d: b\r\n" % number for number in range(connection.MAX_FIELDS))
        client.sendall(b"GET /small HTTP/1.1\r\n" + fields + b"\r\n")
        receive_ok(client)
    for beyond in (fields + b"Host: x\r\n", b"Host: x\r\nLong: " + b"a" * connection.MAX_HEAD_BYTES + b"\r\n"):
        with server.connect() as client:
            client.sendall(b"GET /small HTTP/1.1\r\n" + beyond + b"\r\n")
            assert client.recv(4096).startswith(b"HTTP/1.1 431 ")
    assert server.num_requests == 2


def test_every_request_head_on_a_connection_has_the_same_timeout(server, monkeypatch):
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.3)
    with server.connect() as client:
        for _ in range(3):
            client.sendall(b"GET /small HTTP/1.1\r\nHost: x\r\n\r\n")
            receive_ok(client)
            time.sleep(0.2)  # the timer of the head does not run between requests
        client.sendall(b"GET /small HTTP/1.1\r\n")
        assert client.recv(4096).startswith(b"HTTP/1.1 408 ")


def test_a_client_that_never_sends_anything_is_disconnected(server):
    server.uvicorn.config.timeout_keep_alive = 0.3
    with server.connect() as client:
        assert client.recv(1) == b""


def test_head_and_body_of_a_response_are_sent_together(server, monkeypatch):
    writes = []
    on_response_complete = TimeoutHttpProtocol.on_response_complete

    def record(self):
        writes.append(self.transport.writes)
        on_response_complete(self)

    class CountingTransport:
        def __init__(self, transport):
            self.transport, self.writes = transport, 0

        def __getattr__(self, name):
            self.writes += name in ("write", "writelines")
            return getattr(self.transport, name)

    connection_made = TimeoutHttpProtocol.connection_made
    monkeypatch.setattr(
        TimeoutHttpProtocol,
        "connection_made",
        lambda self, transport: connection_made(self, CountingTransport(transport)),
    )
    monkeypatch.setattr(TimeoutHttpProtocol, "on_response_complete", record)
    with server.connect() as client:
        for number in (1, 2):  # two responses on one connection
            client.sendall(b"GET /small HTTP/1.1\r\nHost: x\r\n\r\n")
            receive_ok(client)
            wait_until(lambda number=number: len(writes) == number)  # the client may read before the server goes on
            assert writes[-1] == number


@pytest.mark.parametrize("end", ["keep-alive", "close"])
def test_a_head_without_a_body_is_sent(server, end):
    with server.connect() as client:
        client.sendall(f"HEAD /small HTTP/1.1\r\nHost: x\r\nConnection: {end}\r\n\r\n".encode())
        assert client.recv(4096).endswith(b"\r\n\r\n")


@pytest.mark.parametrize("server", ["TCP"], indirect=True)
@pytest.mark.parametrize(
    ("request_line", "is_chunked", "body"),
    [
        ("GET /status/200 HTTP/1.1", True, b"2\r\nok\r\n0\r\n\r\n"),
        ("GET /status/200 HTTP/1.0", False, b"ok"),
        ("HEAD /status/200 HTTP/1.1", False, b""),
        ("GET /status/204 HTTP/1.1", False, b""),
        ("GET /status/304 HTTP/1.1", False, b""),
    ],
)
def test_a_body_without_a_length_is_chunked_if_there_is_one_and_the_client_knows_chunks(
    server, request_line, is_chunked, body
):
    with server.connect() as client, client.makefile("rb") as response:
        client.sendall(f"{request_line}\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
        head, _, rest = response.read().partition(b"\r\n\r\n")
    assert (b"transfer-encoding: chunked" in head, rest) == (is_chunked, body)


@pytest.mark.parametrize("server", ["TCP"], indirect=True)
@pytest.mark.parametrize("length", [1, 3])
def test_a_body_that_is_not_as_long_as_its_content_length_is_an_error_of_the_application(server, length):
    with server.connect() as client:
        client.sendall(f"GET /length/{length} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        wait_until(lambda: server.num_finished == 1)


def test_a_head_does_not_wait_for_a_late_body(server):
    with server.connect() as client:
        client.sendall(b"POST /late HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\n\r\n")
        assert client.recv(4096).endswith(b"\r\n\r\n")
        client.sendall(b".")
        assert client.recv(4096) == b"ok"


def test_a_uvicorn_without_the_hook_is_refused_at_the_import():
    code = (
        "from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as protocol\n"
        "del protocol._start_asgi_task\n"
        "import noria.frontend.server.connection"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "install uvicorn>=" in ended.stderr.splitlines()[-1]
