"""Connections to a TLS port that never become one."""

import contextlib
import itertools
import resource
import socket
import ssl

import pytest

from certificates import make_certificate
from frontends import running_frontend
from hostile_neighbours import assert_neighbour_is_served
from noria.config import FrontendConfig
from noria.frontend.server.connection_admission import RESERVED_DESCRIPTORS
from noria.testing.fake_engine import FakeEngine
from waiting import wait_until

NUM_CONNECTIONS, MAX_FILES, MEGABYTE = 200, 512, 2**20
# What an attacker sends instead of a handshake.
SHAPES = {
    "nothing": b"",
    "the beginning of a ClientHello": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "plain HTTP": b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n",
}
FILES_OPENED_LATER = 4
NUM_FILES_OF_TESTS = MAX_FILES + 400  # the connections of the last test but one, and what this process has open


@pytest.fixture(scope="module", autouse=True)
def enough_files():
    """Raises the soft limit of this process: it holds the clients' ends of all connections."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < NUM_FILES_OF_TESTS:
        pytest.skip(f"these tests open {NUM_FILES_OF_TESTS} files, and `ulimit -Hn` is {hard}")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, NUM_FILES_OF_TESTS), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture(scope="module")
def frontend(folder, tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("frontend")
    certificate = make_certificate(tmp_path / "certificate")
    config = FrontendConfig(ssl_certfile=str(certificate.certfile), ssl_keyfile=str(certificate.keyfile))
    with FakeEngine(f"ipc://{folder}/tls") as engine, running_frontend(engine, tmp_path, config, MAX_FILES) as running:
        yield running


def connect_with_tls(frontend):
    return ssl._create_unverified_context().wrap_socket(frontend.connect())


def open_many(opened, frontend, number, shapes):
    for data in itertools.islice(itertools.cycle(shapes), number):
        with contextlib.suppress(ConnectionError):
            opened.enter_context(frontend.connect()).sendall(data)


def test_a_neighbour_is_served_while_200_connections_make_no_handshake(frontend):
    def attack(stopped):
        while not stopped.is_set():
            with contextlib.ExitStack() as opened:
                open_many(opened, frontend, NUM_CONNECTIONS, SHAPES.values())
                stopped.wait(0.5)

    assert_neighbour_is_served(frontend.port, attack, has_tls=True)
    assert b"Traceback" not in frontend.log.read_bytes()


def test_handshakes_that_do_not_end_take_little_memory(frontend):
    connect_with_tls(frontend).close()
    before = frontend.resident_bytes
    with contextlib.ExitStack() as opened:
        open_many(opened, frontend, NUM_CONNECTIONS, [SHAPES["the beginning of a ClientHello"]])
        connect_with_tls(frontend).close()  # accepted after them
        assert frontend.resident_bytes - before < 24 * MEGABYTE  # 58 kB each when measured


def test_plain_http_is_closed_and_not_served(frontend):
    with frontend.connect() as client, contextlib.suppress(ConnectionError):
        client.sendall(SHAPES["plain HTTP"])
        assert b"HTTP" not in client.recv(4096)


def test_connections_without_a_handshake_leave_files_for_the_server(frontend):
    with contextlib.ExitStack() as opened:
        client = opened.enter_context(connect_with_tls(frontend))
        open_many(opened, frontend, MAX_FILES + 50, [b""])
        wait_until(lambda: b"connections_rejected" in frontend.log.read_bytes())
        wait_until(lambda: frontend.process.num_fds() <= MAX_FILES - RESERVED_DESCRIPTORS + FILES_OPENED_LATER)
        client.sendall(SHAPES["plain HTTP"])  # within TLS
        assert client.recv(4096).startswith(b"HTTP/1.1 200 ")


def test_the_metrics_have_tls_on_their_own_port(frontend):
    with (
        socket.create_connection(("127.0.0.1", frontend.metrics_port), 60) as client,
        ssl._create_unverified_context().wrap_socket(client) as wrapped,
    ):
        wrapped.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert wrapped.recv(4096).startswith(b"HTTP/1.1 200 ")
