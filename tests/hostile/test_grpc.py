"""Attacks on gRPC's port. 300 calls without a message and without a key once kept everybody else out."""

import contextlib
import socket
import threading

import grpc
import pytest

from frontends import running_frontend
from hostile_neighbours import assert_neighbour_is_served
from noria.config import Config, FrontendConfig
from noria.frontend.access.api_keys import generate_key
from noria.frontend.protocols.open_inference import grpc_limits
from noria.frontend.protocols.open_inference.grpc_limits import MAX_CALLS_PER_CLIENT, MAX_STREAMS
from noria.frontend.protocols.open_inference.grpc_messages import SERVICE, message
from noria.frontend.server.connection_admission import RESERVED_DESCRIPTORS, max_grpc_connections
from noria.testing.fake_encoder import FAKE_ENCODER
from noria.testing.fake_engine import FakeEngine
from noria.testing.server import reserve_port
from noria_bench.soak.attacks import START
from noria_bench.soak.grpc_attacks import calls_without_message, open_calls
from waiting import wait_until, wait_until_ready

MAX_FILES = 256
FILES_OPENED_LATER = 4  # as in test_heads.py
OK, FULL, UNKNOWN = grpc.StatusCode.OK, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAUTHENTICATED


def call(channel, method, key=None, **fields):
    """Return the status of a call, and its response, if it has one."""
    request = message(f"{method}Request")(**fields).SerializeToString()
    metadata = () if key is None else (("x-api-key", key),)
    try:
        content = channel.unary_unary(f"/{SERVICE}/{method}")(request, timeout=60, metadata=metadata)
    except grpc.RpcError as error:
        return error.code(), None
    return OK, message(f"{method}Response").FromString(content)


def is_model_ready(channel, key):
    return call(channel, "ModelReady", key, name=FAKE_ENCODER.name)[0]


@contextlib.contextmanager
def own_channel(port):
    """A channel with a connection of its own."""
    with grpc.insecure_channel(f"127.0.0.1:{port}", [("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield channel


def open_more_calls_than_allowed(opened, port, key):
    for _ in range(MAX_CALLS_PER_CLIENT // MAX_STREAMS + 2):
        client = opened.enter_context(socket.create_connection(("127.0.0.1", port), 60))
        open_calls(client, "ModelInfer", MAX_STREAMS, key)


@pytest.fixture
def start_server(serve, new_engine, tmp_path):
    """Starts a server: the port, a channel to it, and the keys of an attacker and of another client."""
    with contextlib.ExitStack() as stack:

        def start(**settings):
            keys = [generate_key(name) for name in ("mallory", "alice")]
            (tmp_path / "keys.toml").write_text("".join(table for _, table in keys))
            port = stack.enter_context(reserve_port())
            frontend = FrontendConfig(grpc_port=port, api_keys_file=str(tmp_path / "keys.toml"), **settings)
            url, _ = stack.enter_context(serve(Config(frontend=frontend), new_engine(models=(FAKE_ENCODER,))))
            wait_until_ready(url)
            return port, stack.enter_context(own_channel(port)), *(key for key, _ in keys)

        yield start


@pytest.fixture(scope="module")
def frontend(folder, tmp_path_factory):
    """The port of gRPC of a front end of its own process, which may open `MAX_FILES`, and the front end."""
    with (
        FakeEngine(f"ipc://{folder}/grpc", models=(FAKE_ENCODER,)) as engine,
        reserve_port() as port,
        running_frontend(engine, tmp_path_factory.mktemp("grpc"), FrontendConfig(grpc_port=port), MAX_FILES) as started,
    ):
        yield port, started


@pytest.fixture
def served(start_server):
    return start_server()


def test_a_call_without_a_key_is_rejected_before_its_message(served):
    channel, ended = served[1], threading.Event()
    messages = iter(ended.wait, True)
    with pytest.raises(grpc.RpcError) as rejected:
        channel.stream_unary(f"/{SERVICE}/ModelInfer")(messages, timeout=60)
    ended.set()
    assert rejected.value.code() == UNKNOWN


def test_calls_without_a_message_take_places_of_their_own_client_only(served):
    port, channel, mallory, alice = served
    with contextlib.ExitStack() as opened:
        open_more_calls_than_allowed(opened, port, None)
        assert is_model_ready(channel, mallory) == OK  # calls without a key take none
        open_more_calls_than_allowed(opened, port, mallory)
        wait_until(lambda: is_model_ready(channel, mallory) == FULL)
        assert is_model_ready(channel, alice) == OK
        assert call(channel, "ServerLive")[1].live and call(channel, "ServerReady")[1].ready
    wait_until(lambda: is_model_ready(channel, mallory) == OK)


def test_a_message_that_does_not_come_ends_the_call(served, monkeypatch):
    port, channel, mallory, _ = served
    monkeypatch.setattr(grpc_limits, "_MESSAGE_TIMEOUT_S", 1.0)
    with contextlib.ExitStack() as opened:
        open_more_calls_than_allowed(opened, port, mallory)
        wait_until(lambda: is_model_ready(channel, mallory) == FULL)
        wait_until(lambda: is_model_ready(channel, mallory) == OK)


def test_a_connection_with_more_calls_than_places_loses_none(served):
    """Its library keeps them back."""
    _, channel, mallory, _ = served
    request = message("ModelReadyRequest")(name=FAKE_ENCODER.name).SerializeToString()
    method = channel.unary_unary(f"/{SERVICE}/ModelReady")
    calls = [method.future(request, timeout=60, metadata=(("x-api-key", mallory),)) for _ in range(500)]
    assert {each.code() for each in calls} == {OK}


def test_a_neighbour_is_served_during_calls_without_a_message(frontend):
    port, started = frontend
    assert_neighbour_is_served(started.port, lambda stopped: calls_without_message(port, stopped))


def test_connections_are_limited_and_leave_files_for_http_and_the_server(frontend):
    port, started = frontend
    with contextlib.ExitStack() as opened:
        before = started.process.num_fds()
        idle = [opened.enter_context(socket.create_connection(("127.0.0.1", port), 60)) for _ in range(MAX_FILES)]
        wait_until(lambda: sum(_is_closed(each) for each in idle) == MAX_FILES - max_grpc_connections(MAX_FILES))
        assert started.process.num_fds() - before <= max_grpc_connections(MAX_FILES) + FILES_OPENED_LATER
        clients = [opened.enter_context(started.connect()) for _ in range(MAX_FILES)]
        wait_until(lambda: b"connections_rejected" in started.log.read_bytes())
        wait_until(lambda: started.process.num_fds() <= MAX_FILES - RESERVED_DESCRIPTORS + FILES_OPENED_LATER)
        clients[0].sendall(START + b"\r\n")
        assert clients[0].recv(4096).startswith(b"HTTP/1.1 200 ")


def _is_closed(client):
    client.setblocking(False)
    try:
        return client.recv(4096) == b""  # the library's own settings come first, where it is open
    except BlockingIOError:
        return False
    except ConnectionError:
        return True
