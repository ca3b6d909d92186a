"""Reading GET /v1/live of servers that stream, reject, disconnect, or are not Noria."""

import asyncio
import json
import socket
import threading

import pytest
from fake_live_server import engine_view, engines_event, unreachable_url, view_event

from certificates import make_certificate
from noria.cli.server_address import checked_url, local_url
from noria.cli.top.events import EnginesEvent, EngineViewEvent
from noria.cli.top.stream import ServerUnreachable, _own_certificate, stream_events
from noria.config import FrontendConfig
from noria.errors import ConfigError, LiveError


def error_body(message, code="unauthorized"):
    return json.dumps({"error": {"code": code, "message": message, "request_id": "r"}}).encode()


def collect_events(url, key=None):
    """All events of `url`, and why they ended."""

    async def listen():
        found = []
        try:
            async for event in stream_events(url, key):
                found.append(event)  # noqa: PERF401 - events before an error count
        except ServerUnreachable as error:
            return found, str(error)

    return asyncio.run(listen())


def test_events_are_read_until_the_connection_ends(live_server):
    server = live_server([engines_event("engine-0"), b": still here\n\n", view_event("engine-0", engine_view()), None])
    found, words = collect_events(server.url)
    assert [type(event) for event in found] == [EnginesEvent, EngineViewEvent]
    assert words == "it closed the connection"
    assert server.requests == [("/v1/live?thumbnails=false", None)]


def test_the_key_is_sent(live_server):
    server = live_server([None])
    collect_events(server.url, "noria-key")
    assert server.requests == [("/v1/live?thumbnails=false", "Bearer noria-key")]


def test_chunks_of_any_size_and_line_separators_in_names_are_read(live_server):
    stream = engines_event("engine\u2028-\x85é")
    server = live_server([*(bytes([byte]) for byte in stream), None])
    ((event,), _) = collect_events(server.url)
    assert event.engines[0].name == "engine\u2028-\x85é"


def test_a_closed_port_is_unreachable():
    with unreachable_url() as url:
        found, words = collect_events(url)
    assert found == []
    assert "failed" in words or "refused" in words


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_that_is_full_or_stopping_is_unreachable(live_server, status):
    assert collect_events(live_server((status, error_body("try again"))).url) == (
        [],
        f"it answered {status}: try again",
    )


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (401, error_body("no key came with it."), r"needs an API key: no key came with it\. .*--key-file FILE"),
        (404, error_body("live is off."), r"does not show its live view: live is off\. .*frontend\.live is off"),
        (418, error_body("\x1b[2Jno"), r"answered 418: \\x1b\[2Jno"),
        (404, b"<h1>Not Found</h1>", r"is not Noria: it answered GET /v1/live with status 404\. Give the URL"),
        (200, b"<h1>Welcome</h1>", "is not Noria"),
        (401, b"Who?", "is not Noria"),
    ],
)
def test_an_error_response_is_reported_in_words(live_server, status, body, words):
    with pytest.raises(LiveError, match=words):
        collect_events(live_server((status, body)).url)


@pytest.mark.parametrize("stream", [b"event: engines\ndata: {}\n\n", b"event: engine_view\ndata: \xff\n\n"])
def test_an_invalid_stream_is_reported(live_server, stream):
    with pytest.raises(LiveError, match="that this version of Noria cannot parse"):
        collect_events(live_server([stream]).url)


def test_an_endless_line_is_rejected(live_server):
    server = live_server([b"x" * 2**20] * 20)
    with pytest.raises(LiveError, match="lines of more than"):
        collect_events(server.url)


def test_a_server_that_speaks_no_http_is_unreachable():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            connection, _ = listener.accept()
            connection.recv(1000)
            connection.sendall(b"SSH-2.0-x\r\n")
            connection.close()

        threading.Thread(target=answer, daemon=True).start()
        found, words = collect_events(f"http://127.0.0.1:{listener.getsockname()[1]}")
    assert found == []
    assert words


@pytest.mark.parametrize(
    "url", ["", "localhost:8000", "ftp://a", "http://", "http://a:b", "http://[::1", "http://a:99999"]
)
def test_an_invalid_url_is_rejected(url):
    with pytest.raises(ConfigError, match=r"the URL is .*http://HOST:PORT"):
        checked_url(url)


def test_a_trailing_slash_of_the_url_is_removed():
    assert checked_url("http://host:1/noria/") == "http://host:1/noria"


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:81"), ("0.0.0.0", "http://127.0.0.1:81"), ("::", "http://[::1]:81")],
)
def test_the_url_of_the_local_server_comes_from_the_settings(host, url):
    assert local_url(FrontendConfig(host=host, port=81)) == url


def test_port_0_names_no_server():
    with pytest.raises(ConfigError, match=r"frontend\.port is 0"):
        local_url(FrontendConfig(port=0))


def test_of_a_chain_only_the_servers_own_certificate_is_trusted(tmp_path):
    own, authority = make_certificate(tmp_path / "own"), make_certificate(tmp_path / "authority")
    chain = tmp_path / "chain.pem"
    chain.write_text("von Müller\n" + own.certfile.read_text() + authority.certfile.read_text())
    context = _own_certificate(str(chain))
    assert context.cert_store_stats()["x509"] == 1
    assert context.get_ca_certs(binary_form=True) == [own.der]


@pytest.mark.parametrize("content", ["", "no certificate", "-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----"])
def test_a_file_without_a_certificate_is_an_error(content, tmp_path):
    (tmp_path / "tls.crt").write_text(content)
    with pytest.raises(ConfigError, match=r"frontend\.ssl_certfile"):
        _own_certificate(str(tmp_path / "tls.crt"))
