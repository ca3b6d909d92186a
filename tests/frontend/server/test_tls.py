"""TLS on a real front end: versions, certificates that change while it serves, and handshakes that do not end."""

import asyncio
import contextlib
import functools
import logging
import os
import shutil
import socket
import ssl
import time
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest

from certificates import make_certificate
from noria.config import Config, FrontendConfig
from noria.errors import ConfigError
from noria.frontend.server import connection, tls
from noria.frontend.server.tls import check_certificate, open_key_warning
from waiting import TIMEOUT_S, wait_until, wait_until_async


@pytest.fixture
def certificate(tmp_path):
    return make_certificate(tmp_path / "current")


@pytest.fixture
def url(serve, new_engine, certificate, monkeypatch):
    monkeypatch.setattr(tls, "_POLL_INTERVAL_S", 0.05)
    with serve(Config(frontend=settings(certificate)), new_engine()) as (address, _):
        yield address


def settings(certificate):
    return FrontendConfig(ssl_certfile=str(certificate.certfile), ssl_keyfile=str(certificate.keyfile))


def client_of(url, certificate):
    return httpx.Client(base_url=url, verify=certificate.client_context(), timeout=60)


def served_certificate(url):
    address = urlsplit(url)
    return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate((address.hostname, address.port), timeout=60))


def test_requests_are_served_over_https_and_pages_say_so(url, certificate):
    with client_of(url, certificate) as client:
        assert client.get("/healthz").status_code == 200
        assert url.startswith("https://") and url in client.get("/docs").text


@pytest.mark.parametrize(
    ("version", "is_accepted"),
    [(ssl.TLSVersion.TLSv1_1, False), (ssl.TLSVersion.TLSv1_2, True), (ssl.TLSVersion.TLSv1_3, True)],
)
@pytest.mark.filterwarnings("ignore:ssl.TLSVersion.TLSv1_1 is deprecated")
def test_versions_before_1_2_are_rejected(url, certificate, version, is_accepted):
    address, context = urlsplit(url), certificate.client_context()
    context.set_ciphers("DEFAULT:@SECLEVEL=0")  # else this client's own OpenSSL refuses old versions
    context.minimum_version = context.maximum_version = version
    rejected = pytest.raises(OSError, match=r"ALERT_PROTOCOL_VERSION|EOF|reset")  # by the server
    with (
        contextlib.nullcontext() if is_accepted else rejected,
        socket.create_connection((address.hostname, address.port), 60) as client,
        context.wrap_socket(client, server_hostname="localhost") as wrapped,
    ):
        assert wrapped.version() == version.name.replace("_", ".")


def write_in_place(certificate, successor):
    for file, new in ((certificate.certfile, successor.certfile), (certificate.keyfile, successor.keyfile)):
        file.write_bytes(new.read_bytes())


def swap_links(certificate, successor):
    """Do as certbot: each file is a link, which is replaced."""
    for file, new in ((certificate.certfile, successor.certfile), (certificate.keyfile, successor.keyfile)):
        link = file.with_suffix(".new")
        link.symlink_to(new)
        link.rename(file)


def swap_folders(certificate, successor):
    """Do as the kubelet with a Secret: the files are links into `..data`, a link to a folder, which is replaced."""
    folder = certificate.certfile.parent
    (folder / "..tmp").symlink_to(successor.certfile.parent)
    (folder / "..tmp").rename(folder / "..data")


@pytest.mark.parametrize("swap", [write_in_place, swap_links, swap_folders])
def test_a_changed_certificate_is_used_for_new_connections_and_closes_none(
    swap, serve, new_engine, tmp_path, monkeypatch
):
    monkeypatch.setattr(tls, "_POLL_INTERVAL_S", 0.05)
    first, second = make_certificate(tmp_path / "first"), make_certificate(tmp_path / "second")
    mounted = tmp_path / "mounted"
    mounted.mkdir()
    (mounted / "..data").symlink_to(first.certfile.parent)
    for name in ("tls.crt", "tls.key"):
        if swap is swap_folders:
            (mounted / name).symlink_to(f"..data/{name}")
        else:
            shutil.copy(first.certfile.parent / name, mounted)
    current = type(first)(mounted / "tls.crt", mounted / "tls.key")
    with serve(Config(frontend=settings(current)), new_engine()) as (url, server), client_of(url, first) as client:
        assert client.get("/healthz").status_code == 200
        (kept,) = server.server_state.connections
        swap(current, second)
        wait_until(lambda: served_certificate(url) == second.der)
        assert client.get("/healthz").status_code == 200
        assert kept in server.server_state.connections


@pytest.mark.parametrize("broken", ["no PEM", "another's key", "gone"])
def test_a_broken_new_certificate_keeps_the_old_one_and_is_logged(broken, url, certificate, tmp_path, caplog):
    before = certificate.der
    match broken:
        case "no PEM":
            certificate.certfile.write_text("-----BEGIN CERTIFICATE-----\n")
        case "another's key":
            shutil.copy(make_certificate(tmp_path / "other").keyfile, certificate.keyfile)
        case "gone":
            certificate.keyfile.unlink()
    wait_until(lambda: [each for each in caplog.records if each.levelno == logging.ERROR])
    assert {each.noria_fields["event"] for each in caplog.records} == {"certificate_rejected"}
    assert served_certificate(url) == before
    write_in_place(certificate, successor := make_certificate(tmp_path / "next"))
    wait_until(lambda: served_certificate(url) == successor.der)


def test_a_handshake_that_does_not_end_is_closed_in_time(serve, new_engine, certificate, monkeypatch):
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.3)
    with serve(Config(frontend=settings(certificate)), new_engine()) as (url, _):
        address = urlsplit(url)
        with socket.create_connection((address.hostname, address.port), 60) as client:
            client.sendall(b"\x16\x03\x01\x02\x00\x01")  # the beginning of a ClientHello
            with contextlib.suppress(ConnectionError):
                assert client.recv(1) == b""


def test_a_server_stops_while_a_handshake_is_under_way(serve, new_engine, certificate):
    with contextlib.ExitStack() as opened:
        with serve(Config(frontend=settings(certificate)), new_engine()) as (url, _):
            address = urlsplit(url)
            client = opened.enter_context(socket.create_connection((address.hostname, address.port), 60))
            served_certificate(url)  # so the earlier connection has been accepted
        with contextlib.suppress(ConnectionError):
            assert client.recv(1) == b""


async def test_a_server_that_accepts_no_more_finishes_the_handshakes_of_those_it_has_accepted(certificate):
    admitted, protocols = [], []

    def make_protocol(held):
        protocols.append(asyncio.Protocol())
        return protocols[-1]

    def admit(*of_client):
        admitted.append(of_client)
        return contextlib.ExitStack()

    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as first:
        address = listener.getsockname()
        server = tls.TlsServer(
            listener, make_protocol, tls.Certificate(certificate.certfile, certificate.keyfile), admit
        )
        await wait_until_async(lambda: admitted)
        stopping = asyncio.create_task(server.stop_accepting())
        await asyncio.wait([stopping], timeout=0.05)
        assert not stopping.done()
        with socket.create_connection(address):
            handshake = asyncio.to_thread(certificate.client_context().wrap_socket, first, server_hostname="localhost")
            async with asyncio.timeout(TIMEOUT_S):
                (await handshake).close()
                await stopping
        assert (len(protocols), len(admitted)) == (1, 1)


async def test_servers_that_share_a_listener_serve_each_connection_once_and_the_forestalled_one_also_alone(certificate):
    """Two are woken by a connection, which one of them gets; `processes` front ends are such servers."""
    made = [], []

    def make_protocol(of_server, held):
        of_server.append(asyncio.Protocol())
        return of_server[-1]

    async def connect():
        client = await asyncio.to_thread(socket.create_connection, address)
        with client:
            handshake = asyncio.to_thread(certificate.client_context().wrap_socket, client, server_hostname="localhost")
            (await handshake).close()

    with socket.create_server(("127.0.0.1", 0)) as listener, listener.dup() as shared:
        address, context = listener.getsockname(), tls.Certificate(certificate.certfile, certificate.keyfile)
        servers = [
            tls.TlsServer(each, functools.partial(make_protocol, of_server), context, lambda *_: contextlib.ExitStack())
            for each, of_server in zip((listener, shared), made, strict=True)
        ]
        async with asyncio.timeout(TIMEOUT_S):
            for number in range(1, 5):
                await connect()
                await wait_until_async(lambda number=number: sum(map(len, made)) == number)
            forestalled, other = sorted((0, 1), key=lambda number: len(made[number]))
            before = len(made[forestalled])
            await servers[other].stop_accepting()
            await connect()
            await wait_until_async(lambda: len(made[forestalled]) == before + 1)
            await servers[forestalled].stop_accepting()


def test_a_client_that_does_not_answer_the_end_of_its_connection_delays_no_stop(serve, new_engine, certificate):
    config = Config(frontend=msgspec.structs.replace(settings(certificate), drain_s=20.0))
    with contextlib.ExitStack() as opened:
        with serve(config, new_engine()) as (url, server):
            address = urlsplit(url)
            client = opened.enter_context(socket.create_connection((address.hostname, address.port), 60))
            mute = opened.enter_context(certificate.client_context().wrap_socket(client, server_hostname="localhost"))
            mute.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert mute.recv(65_536).startswith(b"HTTP/1.1 200")
            wait_until(lambda: server.server_state.connections)
            started = time.monotonic()
        assert time.monotonic() - started < 10


def test_a_client_that_does_not_answer_the_end_of_an_idle_connection_loses_it(serve, new_engine, certificate):
    with serve(Config(frontend=settings(certificate)), new_engine()) as (url, server):
        server.config.timeout_keep_alive = 0.1
        address = urlsplit(url)
        with (
            socket.create_connection((address.hostname, address.port), 60) as client,
            certificate.client_context().wrap_socket(client, server_hostname="localhost"),
        ):
            wait_until(lambda: server.server_state.connections)
            wait_until(lambda: not server.server_state.connections)


def test_a_certificate_that_cannot_be_used_is_an_error_with_what_to_do(certificate, tmp_path):
    other = make_certificate(tmp_path / "other")
    for certfile, keyfile, words in [
        (certificate.certfile, other.keyfile, r"KEY_VALUES_MISMATCH.*must be a PEM file"),
        (tmp_path / "none", certificate.keyfile, "No such file"),
        ("", certificate.keyfile, r"needs frontend\.ssl_certfile"),
        (certificate.certfile, "", "PEM"),
    ]:
        with pytest.raises(ConfigError, match=words):
            check_certificate(FrontendConfig(ssl_certfile=str(certfile), ssl_keyfile=str(keyfile)))
    both = tmp_path / "both.pem"
    both.write_bytes(certificate.certfile.read_bytes() + certificate.keyfile.read_bytes())
    check_certificate(FrontendConfig(ssl_certfile=str(both)))


def test_a_key_with_a_passphrase_is_rejected_without_asking_for_it(certificate):
    encrypted = certificate.keyfile.with_suffix(".encrypted")
    command = f"openssl ec -aes256 -passout pass:secret -in {certificate.keyfile} -out {encrypted} 2>/dev/null"
    assert os.system(command) == 0
    with pytest.raises(ConfigError, match="has a passphrase"):
        check_certificate(FrontendConfig(ssl_certfile=str(certificate.certfile), ssl_keyfile=str(encrypted)))


@pytest.mark.parametrize(("mode", "is_open"), [(0o600, False), (0o640, False), (0o644, True)])
def test_a_key_that_everybody_may_read_is_said(certificate, mode, is_open):
    certificate.keyfile.chmod(mode)
    assert bool(open_key_warning(settings(certificate))) == is_open


def test_a_changed_mode_of_the_key_has_the_files_read_again(certificate):
    current = tls.Certificate(str(certificate.certfile), str(certificate.keyfile))
    before = current._read_version()
    wait_until(lambda: certificate.keyfile.chmod(0o640) or current._read_version() != before)
