"""Connections of one client and of all are bounded, and bodies count from their first byte."""

import contextlib
import socket
import ssl

import httpx
import pytest

from certificates import make_certificate
from noria.config import Config, FrontendConfig
from noria.frontend.http import body
from waiting import wait_until, wait_until_ready


def connect(url, stack):
    parts = httpx.URL(url)
    return stack.enter_context(socket.create_connection((parts.host, parts.port), timeout=20))


def connect_with_tls(url, stack):
    """Return a connection after its handshake, or one that was closed instead."""
    connection = connect(url, stack)
    with contextlib.suppress(OSError):
        return stack.enter_context(ssl._create_unverified_context().wrap_socket(connection))
    return connection


def is_closed(connection):
    try:
        connection.setblocking(False)
        return connection.recv(1) == b""
    except (BlockingIOError, ssl.SSLWantReadError):
        return False
    except OSError:
        return True


def is_ready(url):
    with contextlib.suppress(httpx.TransportError):  # there are too many connections
        return httpx.get(f"{url}/readyz", verify=False, timeout=60).status_code == 200


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    return make_certificate(tmp_path_factory.mktemp("certificate"))


@pytest.mark.parametrize(
    ("limits", "num_open"),
    [
        ({"max_connections_per_client": 20, "trusted_proxies": ()}, 20),
        ({"max_connections": 30, "trusted_proxies": ()}, 30),
        ({"max_connections": 30, "max_connections_per_client": 20}, 30),  # this machine is a proxy by default
    ],
)
@pytest.mark.parametrize("kind", ["without TLS", "before the handshake", "with TLS"])
def test_connections_are_bounded_and_free_again_when_they_end(serve, new_engine, limits, num_open, kind, certificate):
    files = {"ssl_certfile": str(certificate.certfile), "ssl_keyfile": str(certificate.keyfile)}
    config = FrontendConfig(**limits, **({} if kind == "without TLS" else files))
    connect_one = connect_with_tls if kind == "with TLS" else connect
    with serve(Config(frontend=config), new_engine()) as (url, _):
        wait_until_ready(url)
        with contextlib.ExitStack() as stack:
            opened = [connect_one(url, stack) for _ in range(50)]
            wait_until(lambda: sum(not is_closed(each) for each in opened) in (num_open, num_open - 1))
        wait_until(lambda: is_ready(url))
        with contextlib.ExitStack() as stack:
            for _ in range(num_open - 2):
                connect_one(url, stack)
            wait_until(lambda: is_ready(url))
        wait_until(lambda: is_ready(url))


def test_small_bodies_that_stop_are_counted_and_others_are_served(serve, new_engine, monkeypatch):
    monkeypatch.setattr(body, "MAX_SMALL_BODIES_PER_CLIENT", 5)
    head = "POST /t2i HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: 60000\r\n\r\n{"
    with serve(Config(), new_engine()) as (url, _), contextlib.ExitStack() as stack:
        wait_until_ready(url)
        opened = [connect(url, stack) for _ in range(12)]
        for each in opened:
            each.sendall(head.encode())
        for each in opened:
            each.settimeout(0.3)
        answers = []
        for each in opened:
            with contextlib.suppress(TimeoutError):
                answers.append(each.recv(4096).split(b"\r\n")[0])
        assert answers == [b"HTTP/1.1 429 Too Many Requests"] * 7
        wait_until(lambda: sum(map(is_closed, opened)) == 7)
        whole = connect(url, stack)  # a body that comes with its head does not count
        content = b'{"prompt": "p"}'
        whole.sendall(head[:-1].replace("60000", str(len(content))).encode() + content)
        assert whole.recv(4096).startswith(b"HTTP/1.1 200 OK")
