"""A real HAProxy (Debian: haproxy) with the configuration of deploy/ has the limits that a Noria on Ray lacks."""

import contextlib
import http.server
import os
import re
import shutil
import socket
import subprocess
import threading
import time

import pytest
from container import DEPLOY

from noria.frontend.server.connection import HEAD_TIMEOUT_S, MAX_FIELDS, MAX_HEAD_BYTES, STALL_TIMEOUT_S
from noria.settings import load
from noria.testing.server import reserve_port
from waiting import wait_until

CONFIG = DEPLOY / "haproxy" / "haproxy.cfg"
HAPROXY = shutil.which("haproxy", path=f"{os.environ['PATH']}:/usr/sbin")  # where Debian has it
TIMEOUT_S, MAX_CONNECTIONS = 2, 20  # values of the test, in place of half a minute and a thousand
pytestmark = [
    pytest.mark.slow,  # waits for time-outs: 15 s
    pytest.mark.skipif(HAPROXY is None, reason="needs Debian's haproxy"),
]


class Backend(http.server.BaseHTTPRequestHandler):
    """Stands for Ray's server: answers at once, after `TIMEOUT_S`, or with more than a client reads."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        if self.path == "/slow":
            time.sleep(1.5 * TIMEOUT_S)
        num_bytes = 50_000_000 if self.path == "/large" else 2
        self.send_response(200)
        self.send_header("Content-Length", str(num_bytes))
        self.end_headers()
        with contextlib.suppress(OSError):  # HAProxy has closed the connection
            self.wfile.write(bytes(num_bytes))

    def log_message(self, *_):
        pass


class Server(http.server.ThreadingHTTPServer):
    """A backend; some of its connections are reset in the tests."""

    def handle_error(self, *_):
        pass


@pytest.fixture(scope="module")
def port(tmp_path_factory):
    file = tmp_path_factory.mktemp("haproxy") / "haproxy.cfg"
    server = Server(("127.0.0.1", 0), Backend)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    with reserve_port() as chosen:
        pass
    text = re.sub(r"(http-request|client) 30s", rf"\1 {TIMEOUT_S}s", CONFIG.read_text())
    text = text.replace("gt 1024", f"gt {MAX_CONNECTIONS}").replace("bind :8080", f"bind 127.0.0.1:{chosen}")
    text = re.sub("    server node1 .*", f"    server node1 127.0.0.1:{server.server_port} check inter 200ms", text)
    file.write_text(re.sub("    server node2 .*\n", "", text))
    process = subprocess.Popen([HAPROXY, "-db", "-q", "-f", str(file)])
    try:
        wait_until(lambda: ask(chosen, b"GET / HTTP/1.1\r\n\r\n").endswith(b"\0\0"), ignoring=(OSError,))
        yield chosen
    finally:
        process.terminate()
        process.wait()
        server.shutdown()
        server.server_close()
        thread.join()


def ask(port, data):
    """Send `data`, and return the first piece of the response."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(data)
        response = connection.recv(1000)
        if response.endswith(b"\r\n\r\n"):
            response += connection.recv(1000)
        return response


def status_of(port, *fields, path="/"):
    head = "\r\n".join([f"GET {path} HTTP/1.1", "Host: noria", *fields])
    return int(ask(port, f"{head}\r\n\r\n".encode()).split()[1])


def test_its_limits_are_those_of_the_server():
    text = CONFIG.read_text()
    config = load(None, {}, {}).frontend
    assert f"maxconn {config.max_connections}\n" in text
    assert f"sc0_conn_cur gt {config.max_connections_per_client} " in text
    assert f"tune.bufsize {MAX_HEAD_BYTES + 1024}\n" in text
    assert f"tune.http.maxhdr {MAX_FIELDS}\n" in text
    assert f"timeout http-request {HEAD_TIMEOUT_S:.0f}s " in text
    assert f"timeout client {STALL_TIMEOUT_S:.0f}s " in text
    assert f"timeout server {config.request_timeout_s + 60:.0f}s " in text


def test_heads_are_limited_in_bytes_fields_and_time(port):
    assert status_of(port, *(f"a{number}: b" for number in range(MAX_FIELDS - 5))) == 200
    assert status_of(port, *(f"a{number}: b" for number in range(MAX_FIELDS + 1))) == 400
    assert status_of(port, f"a: {'b' * (MAX_HEAD_BYTES + 1024)}") == 400
    assert ask(port, b"GET / HTTP/1.1\r\nHost: noria\r\n").startswith(b"HTTP/1.1 408 ")


def test_a_client_that_waits_stays_and_one_that_does_not_read_is_closed(port):
    assert status_of(port, path="/slow") == 200
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
        connection.settimeout(60)
        connection.connect(("127.0.0.1", port))
        connection.sendall(b"GET /large HTTP/1.1\r\nHost: noria\r\n\r\n")
        time.sleep(2 * TIMEOUT_S)
        num_bytes = 0
        with contextlib.suppress(ConnectionResetError):
            while piece := connection.recv(1_000_000):
                num_bytes += len(piece)
    assert num_bytes < 50_000_000


def test_connections_of_one_address_are_limited(port):
    def is_closed(connection):
        connection.settimeout(0.2)
        try:
            return connection.recv(1) == b""
        except TimeoutError:
            return False
        except ConnectionResetError:
            return True

    with contextlib.ExitStack() as stack:
        opened = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port))) for _ in range(MAX_CONNECTIONS + 10)
        ]
        wait_until(lambda: is_closed(opened[-1]))
        assert sum(map(is_closed, opened)) in (10, 11)  # a probe of before may still count as a connection
    wait_until(lambda: status_of(port) == 200, ignoring=(IndexError, OSError))
