"""Request heads without end, before any key is checked, and the port of the metrics."""

import contextlib
import itertools
import re

import httpx
import pytest

from hostile_neighbours import assert_neighbour_is_served
from noria.frontend.server.connection import MAX_FIELDS, MAX_HEAD_BYTES, MAX_PIPELINED_REQUESTS
from noria.frontend.server.connection_admission import RESERVED_DESCRIPTORS
from noria_bench.soak.attacks import CHUNKED, ENDLESS_HEADS, START, begin, heads_without_end, send_endlessly
from waiting import wait_until

NUM_CONNECTIONS, MEGABYTE = 24, 2**20
FILES_OPENED_LATER = 4  # by the server itself, while the connections had all below the reserved ones
shapes = pytest.mark.parametrize(("start", "repeated"), ENDLESS_HEADS.values(), ids=ENDLESS_HEADS)


def read_all(client):
    received = b""
    with contextlib.suppress(ConnectionError):
        while piece := client.recv(65536):
            received += piece
    return received


@shapes
def test_a_head_beyond_the_limits_is_answered_431_and_closed(frontend_process, start, repeated):
    pieces = (MAX_HEAD_BYTES + 1) // len(repeated) if len(repeated) == 1 else MAX_FIELDS + 1
    with frontend_process.connect() as client:
        begin(client, start)
        client.sendall(repeated * pieces)
        client.sendall(repeated[:1])  # a field is complete when the next one begins
        assert read_all(client).startswith(b"HTTP/1.1 431 ")


def test_a_head_within_the_limits_is_served_also_in_small_pieces(frontend_process):
    fields = b"".join(b"a%d: b\r\n" % number for number in range(MAX_FIELDS - 2))
    head = START + fields + b"long: " + b"v" * (MAX_HEAD_BYTES - 2048) + b"\r\n\r\n"
    with frontend_process.connect() as client:
        for _ in range(3):  # the limits are of each head, not of the connection
            for start in range(0, len(head), 10_000):
                client.sendall(head[start : start + 10_000])
            assert client.recv(4096).startswith(b"HTTP/1.1 200 ")


def test_heads_without_end_take_no_memory(frontend_process):
    """Each connection would send 2 MB; short fields would take twenty times as much memory."""
    with frontend_process.connect() as client:
        send_endlessly(client, *ENDLESS_HEADS["many short fields"], MEGABYTE)
    before = frontend_process.resident_bytes
    with contextlib.ExitStack() as opened:
        for shape in itertools.islice(itertools.cycle(ENDLESS_HEADS.values()), NUM_CONNECTIONS):
            client = opened.enter_context(frontend_process.connect())
            send_endlessly(client, *shape, 2 * MEGABYTE)
        assert frontend_process.resident_bytes - before < 16 * MEGABYTE


def test_a_neighbour_is_served_while_heads_without_end_arrive(frontend_process):
    assert_neighbour_is_served(frontend_process.port, lambda stopped: heads_without_end(frontend_process.port, stopped))


def test_trailers_never_become_fields_of_the_request(frontend_process):
    """The application may look at its fields while they arrive."""
    body = b"2\r\n{}\r\n0\r\nx-request-id: trailer\r\n\r\n"
    with frontend_process.connect() as client:
        begin(client, CHUNKED + body)
        answer = client.recv(65536)
    assert answer.startswith(b"HTTP/1.1 400 ") and b"trailer" not in answer


def test_requests_that_wait_for_earlier_ones_of_their_connection_are_limited(frontend_process):
    before = frontend_process.resident_bytes
    flood = START + b"\r\n"
    with frontend_process.connect() as client:
        num_sent = send_endlessly(client, b"", flood, 8 * MEGABYTE)
        answers = read_all(client).count(b"HTTP/1.1 ")
    assert num_sent < 8 * MEGABYTE and answers <= MAX_PIPELINED_REQUESTS
    assert frontend_process.resident_bytes - before < 16 * MEGABYTE


def test_a_few_requests_at_once_are_answered_in_order(frontend_process):
    with frontend_process.connect() as client:
        client.sendall(
            b"".join(START + b"X-Request-Id: n%d\r\n\r\n" % number for number in range(MAX_PIPELINED_REQUESTS))
        )
        answers = b""
        while answers.count(b"alive") < MAX_PIPELINED_REQUESTS:
            answers += client.recv(65536)
    ids = re.findall(rb"x-request-id: n(\d+)", answers)
    assert [int(each) for each in ids] == list(range(MAX_PIPELINED_REQUESTS))


def test_metrics_may_have_a_port_of_their_own(frontend_process):
    def status(port, path):
        return httpx.get(f"http://127.0.0.1:{port}{path}", verify=False, timeout=60).status_code

    assert status(frontend_process.port, "/healthz") == 200
    assert status(frontend_process.port, "/metrics") == 404
    assert status(frontend_process.metrics_port, "/metrics") == 200
    assert status(frontend_process.metrics_port, "/healthz") == 404
    assert status(frontend_process.metrics_port, "/v1/jobs") == 404


def test_idle_connections_leave_files_for_the_server_and_are_logged_when_shut_out(frontend_process):
    with contextlib.ExitStack() as opened:
        clients = [opened.enter_context(frontend_process.connect()) for _ in range(300)]
        wait_until(lambda: b"connections_rejected" in frontend_process.log.read_bytes())
        wait_until(lambda: frontend_process.process.num_fds() <= 256 - RESERVED_DESCRIPTORS + FILES_OPENED_LATER)
        clients[0].sendall(START + b"\r\n")
        assert clients[0].recv(4096).startswith(b"HTTP/1.1 200 ")
    assert frontend_process.log.read_bytes().count(b"connections_rejected") == 1
