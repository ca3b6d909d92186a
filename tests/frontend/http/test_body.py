"""Long bodies: how many are received at once, over real sockets. What is in them is in the tests of the routes."""

import contextlib
import socket

import httpx
import pytest

from noria.config import Config
from noria.frontend.http import body as bodies
from noria.frontend.http.body import MAX_LARGE_BODIES, MAX_LARGE_BODIES_PER_CLIENT

LONG = b'{"prompt": "p"}' + b" " * 70_000
GO_ON = b"HTTP/1.1 100 Continue\r\n\r\n"


@pytest.fixture
def served(serve, new_engine, ready):
    with serve(Config(), new_engine()) as (url, _):
        ready(url)
        yield httpx.URL(url)


@pytest.fixture
def announce(served):
    """Announces a body from an address, and returns the connection and what the server says to it first."""
    with contextlib.ExitStack() as stack:

        def begin(address, length="Content-Length: 100000", body=b"", path="/t2i"):
            begun = stack.enter_context(socket.create_connection((served.host, served.port), 60, (address, 0)))
            head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nExpect: 100-continue\r\n{length}\r\n\r\n"
            begun.sendall(head.encode() + body)
            said = begun.recv(4096)
            while not (said == GO_ON or said.endswith(b"}")):
                said += begun.recv(4096)
            return begun, said

        yield begin


def post(url, content):
    headers = {"content-type": "application/json"}
    return httpx.post(f"{url}/t2i", content=content, headers=headers, verify=False, timeout=60)


@pytest.mark.parametrize("path", ["/t2i", "/v1/images/generations", "/v1/jobs", "/sdapi/v1/options"])
def test_one_client_has_its_share_of_long_bodies_over_all_routes(announce, served, path):
    for number in range(MAX_LARGE_BODIES_PER_CLIENT):
        assert announce("127.0.0.2", path=("/t2i", path)[number % 2])[1] == GO_ON
    _, refused = announce("127.0.0.2", path=path)
    assert refused.startswith(b"HTTP/1.1 429 ")
    assert b"\r\nretry-after: 5\r\n" in refused.lower()
    assert b"the address 127.0.0.2 has 16 bodies of more than 65536 bytes already" in refused
    assert announce("127.0.0.2", "Content-Length: 65536", path=path)[1] == GO_ON  # it is short
    assert post(served, LONG).status_code == 200


def test_only_so_many_long_bodies_are_received_at_once(announce, served):
    for number in range(MAX_LARGE_BODIES):
        assert announce(f"127.0.0.{number // MAX_LARGE_BODIES_PER_CLIENT + 2}")[1] == GO_ON
    refused = post(served, LONG)
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limited")
    assert post(served, b'{"prompt": "p"}').status_code == 200


def test_a_body_that_turns_out_to_be_long_counts_from_then_on(announce):
    for _ in range(MAX_LARGE_BODIES_PER_CLIENT):
        announce("127.0.0.2")
    begun, said = announce("127.0.0.2", "Transfer-Encoding: chunked")
    assert said == GO_ON
    begun.sendall(b"ffff\r\n" + LONG[:0xFFFF] + b"\r\n2\r\n  \r\n")
    assert begun.recv(4096).startswith(b"HTTP/1.1 429 ")


def test_a_long_body_counts_until_it_is_there_or_late(announce, served, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(bodies, "_TIMEOUT_S", 0.3)
        for begun, said in [announce("127.0.0.2") for _ in range(MAX_LARGE_BODIES_PER_CLIENT)]:
            refused = said.removeprefix(GO_ON) or begun.recv(4096)  # it may have come with the first words
            assert refused.startswith(b"HTTP/1.1 400 ")
    for _ in range(MAX_LARGE_BODIES_PER_CLIENT):
        assert post(served, LONG).status_code == 200
    assert announce("127.0.0.2")[1] == GO_ON
