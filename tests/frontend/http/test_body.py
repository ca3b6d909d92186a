"""Limits on large bodies received at once, over real sockets."""

import contextlib
import socket

import httpx
import pytest

from noria.config import Config
from noria.frontend.http import body as body_module
from noria.frontend.http.body import MAX_LARGE_BODIES, MAX_LARGE_BODIES_PER_CLIENT
from waiting import wait_until_ready

LARGE = b'{"prompt": "p"}' + b" " * 70_000
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


@pytest.fixture
def served(serve, new_engine):
    with serve(Config(), new_engine()) as (url, _):
        wait_until_ready(url)
        yield httpx.URL(url)


@pytest.fixture
def announce(served):
    """Announces a body from an address; returns the connection and the first response to it."""
    with contextlib.ExitStack() as stack:

        def send(address, length="Content-Length: 100000", body=b"", path="/t2i"):
            connection = stack.enter_context(socket.create_connection((served.host, served.port), 60, (address, 0)))
            head = (
                f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                f"Expect: 100-continue\r\n{length}\r\n\r\n"
            )
            connection.sendall(head.encode() + body)
            response = connection.recv(4096)
            while not (response == CONTINUE or response.endswith(b"}")):
                response += connection.recv(4096)
            return connection, response

        yield send


def post(url, content):
    headers = {"content-type": "application/json"}
    return httpx.post(f"{url}/t2i", content=content, headers=headers, verify=False, timeout=60)


@pytest.mark.parametrize("path", ["/t2i", "/v1/images/generations", "/v1/jobs", "/sdapi/v1/options"])
def test_the_limit_of_large_bodies_per_client_spans_all_routes(announce, served, path):
    for number in range(MAX_LARGE_BODIES_PER_CLIENT):
        assert announce("127.0.0.2", path=("/t2i", path)[number % 2])[1] == CONTINUE
    _, rejected = announce("127.0.0.2", path=path)
    assert rejected.startswith(b"HTTP/1.1 429 ")
    assert b"\r\nretry-after: 5\r\n" in rejected.lower()
    assert b"the address 127.0.0.2 has 16 bodies of more than 65536 bytes already" in rejected
    assert announce("127.0.0.2", "Content-Length: 65536", path=path)[1] == CONTINUE  # it is small
    assert post(served, LARGE).status_code == 200


def test_large_bodies_of_all_clients_together_are_limited(announce, served):
    for number in range(MAX_LARGE_BODIES):
        assert announce(f"127.0.0.{number // MAX_LARGE_BODIES_PER_CLIENT + 2}")[1] == CONTINUE
    rejected = post(served, LARGE)
    assert (rejected.status_code, rejected.json()["error"]["code"]) == (429, "rate_limited")
    assert post(served, b'{"prompt": "p"}').status_code == 200


def test_a_chunked_body_counts_once_it_is_large(announce):
    for _ in range(MAX_LARGE_BODIES_PER_CLIENT):
        announce("127.0.0.2")
    connection, response = announce("127.0.0.2", "Transfer-Encoding: chunked")
    assert response == CONTINUE
    connection.sendall(b"ffff\r\n" + LARGE[:0xFFFF] + b"\r\n2\r\n  \r\n")
    assert connection.recv(4096).startswith(b"HTTP/1.1 429 ")


def test_a_large_body_counts_until_it_is_received_or_times_out(announce, served, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(body_module, "_TIMEOUT_S", 0.3)
        for connection, response in [announce("127.0.0.2") for _ in range(MAX_LARGE_BODIES_PER_CLIENT)]:
            # it may have come with the first response
            rejected = response.removeprefix(CONTINUE) or connection.recv(4096)
            assert rejected.startswith(b"HTTP/1.1 400 ")
    for _ in range(MAX_LARGE_BODIES_PER_CLIENT):
        assert post(served, LARGE).status_code == 200
    assert announce("127.0.0.2")[1] == CONTINUE
