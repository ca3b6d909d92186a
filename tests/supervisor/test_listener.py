"""The listening sockets: who can reach them, those of the metrics, and how many files connections may take."""

import asyncio
import fcntl
import logging
import os
import pathlib
import resource
import socket
import stat
import tempfile
import threading

import pytest

from noria.config import FrontendConfig
from noria.errors import ConfigError
from noria.supervisor import listener as listener_module
from noria.supervisor.listener import (
    listen,
    open_listeners,
    raise_file_limit,
    server_url,
    wait_until_answering,
    warn_if_open,
)
from waiting import TIMEOUT_S


def assert_rejected(message, **settings):
    """`message` is a pattern."""
    with pytest.raises(ConfigError, match=message), open_listeners(FrontendConfig(**settings)):
        pass


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid", "a" * 64])
def test_an_address_of_another_machine_is_rejected(host):
    with pytest.raises(ConfigError, match=f"{host[:60]}.*(--host|no address)"):
        listen(host, 0)


def test_an_ipv6_address_can_be_listened_on():
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has IPv6 switched off: there is no address to listen on")
    with listen("::", 0) as listener, socket.create_connection(("127.0.0.1", listener.getsockname()[1])):
        pass


@pytest.mark.parametrize(
    ("host", "api_keys_file", "warns"),
    [("0.0.0.0", "", True), ("0.0.0.0", "keys.toml", False), ("127.0.0.1", "", False), ("localhost", "", False)],
)
def test_a_server_that_others_reach_without_keys_says_so(host, api_keys_file, warns, caplog):
    config = FrontendConfig(host=host, port=0, api_keys_file=api_keys_file)
    with caplog.at_level(logging.WARNING, "noria.supervisor"), open_listeners(config) as (listener,):
        warn_if_open(listener, config)
    assert [record.noria_fields["event"] for record in caplog.records] == ["open_without_keys"] * warns


def test_a_key_that_everybody_may_read_is_said_at_the_start(tmp_path, caplog):
    key = tmp_path / "tls.key"
    key.touch(0o644)
    config = FrontendConfig(port=0, ssl_certfile="tls.crt", ssl_keyfile=str(key))
    with open_listeners(config) as (listener,):
        warn_if_open(listener, config)
    assert [record.noria_fields["event"] for record in caplog.records] == ["key_open_to_others"]


def test_metrics_may_have_an_address_of_their_own():
    with open_listeners(FrontendConfig(port=0, metrics_address="127.0.0.2:0")) as listeners:
        assert [each.getsockname()[0] for each in listeners] == ["127.0.0.1", "127.0.0.2"]


@pytest.mark.parametrize("address", ["9464", ":9464", "127.0.0.1", "127.0.0.1:", "127.0.0.1:65536", "127.0.0.1:x"])
def test_an_address_of_metrics_has_a_host_and_a_port(address):
    assert_rejected(r"metrics_address is .*allowed is ADDRESS:PORT", port=0, metrics_address=address)


def test_the_soft_limit_of_open_files_becomes_the_hard_one():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    try:
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# ── Unix sockets ──────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def path():
    with tempfile.TemporaryDirectory(prefix="noria") as folder:  # pytest's own are too long for the path of a socket
        yield pathlib.Path(folder, "noria.sock")


def test_a_unix_socket_is_for_its_owner_and_group_and_removed_at_the_end(path):
    with open_listeners(FrontendConfig(uds=str(path))) as (listener,):
        assert server_url(listener, has_tls=False) == f"unix:{path}"
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
    assert not path.exists()


def test_the_socket_of_a_killed_server_is_replaced_and_that_of_a_running_one_is_not(path):
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(path))  # as it is left: nobody listens
    with open_listeners(FrontendConfig(uds=str(path))):
        before = path.stat().st_ino
        assert_rejected(r"frontend\.uds.*another server listens there", uds=str(path))
        assert path.stat().st_ino == before


def test_a_running_server_whose_backlog_is_full_keeps_its_socket(path):
    with socket.socket(socket.AF_UNIX) as running, socket.socket(socket.AF_UNIX) as client:
        running.bind(str(path))
        running.listen(0)
        client.connect(str(path))  # nobody accepts it
        assert_rejected("another server", uds=str(path))
        assert path.exists()


def test_the_socket_of_a_successor_is_not_removed(path):
    with open_listeners(FrontendConfig(uds=str(path))) as (listener,):
        listener.close()  # as at the beginning of a stop
        successor = open_listeners(FrontendConfig(uds=str(path)))
        successor.__enter__()
    assert path.exists()
    successor.__exit__(None, None, None)
    assert not path.exists()


def test_a_folder_that_stays_locked_is_an_error_with_what_to_do(path, monkeypatch):
    monkeypatch.setattr(listener_module, "_LOCK_TIMEOUT_S", 0.2)
    folder = os.open(path.parent, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    assert_rejected("is locked by another process", uds=str(path))
    os.close(folder)
    with open_listeners(FrontendConfig(uds=str(path))):
        pass


def test_a_folder_that_is_locked_for_a_moment_is_waited_for(path):
    folder = os.open(path.parent, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    threading.Timer(0.2, os.close, [folder]).start()
    with open_listeners(FrontendConfig(uds=str(path))):
        pass


def test_a_file_of_another_kind_is_not_replaced(path):
    path.write_text("mine")
    assert_rejected("a file of another kind", uds=str(path))
    assert path.read_text() == "mine"


@pytest.mark.parametrize(
    ("uds", "words"),
    [
        ("/no-folder/noria.sock", "Its folder must exist"),
        ("noria.sock", "allowed is an absolute path"),
        ("@noria", "allowed is an absolute path"),
        ("//host/noria.sock", "allowed is an absolute path"),
        ("/" + "é" * 54, "of 109 bytes; allowed is an absolute path of at most 107 bytes"),
        *((f"/run/a{odd}b", "without [?], # and control characters") for odd in "?#\0\n\x1b\ud800"),
    ],
)
def test_a_path_that_is_no_place_for_a_socket_is_an_error_with_what_to_do(uds, words):
    assert_rejected(words, uds=uds)


def test_the_longest_path_and_characters_that_urls_escape_are_served(path):
    longest = path.with_name(f"ü %20;@:{'x' * 107}")
    name = os.fsencode(longest)[:107].decode()
    with open_listeners(FrontendConfig(uds=name)) as (listener,):
        url = server_url(listener, has_tls=False)
        assert url == f"unix:{name}"

        async def answer():
            async def respond(_reader, writer):
                writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
                writer.close()

            async with await asyncio.start_unix_server(respond, sock=listener.dup()):
                await asyncio.wait_for(wait_until_answering(url), TIMEOUT_S)

        asyncio.run(answer())


def test_a_unix_socket_without_keys_is_not_open_to_other_machines(path, caplog):
    config = FrontendConfig(uds=str(path))
    with open_listeners(config) as (listener,):
        warn_if_open(listener, config)
    assert caplog.records == []
