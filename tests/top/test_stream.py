"""GET /v1/live from real servers that show, refuse, break off, or are none of ours."""

import asyncio
import json
import socket
import threading

import pytest
from showing import a_view, engines_said, nobody, wheel_said

from noria.config import FrontendConfig
from noria.errors import ConfigError, LiveError
from noria.top.events import Engines, Wheel
from noria.top.stream import Away, checked_url, events, local_url


def refusal(message, code="unauthorized"):
    return json.dumps({"error": {"code": code, "message": message, "request_id": "r"}}).encode()


def heard(url, key=None):
    """Everything that `url` says until it ends."""

    async def listen():
        found = []
        try:
            async for event in events(url, key):
                found.append(event)  # noqa: PERF401 - what was heard before the end counts
        except Away as error:
            return found, str(error)

    return asyncio.run(listen())


def test_what_is_said_is_heard_until_the_connection_ends(live_server):
    server = live_server([engines_said("engine-0"), b": still here\n\n", wheel_said("engine-0", a_view()), None])
    found, words = heard(server.url)
    assert [type(event) for event in found] == [Engines, Wheel]
    assert words == "it has ended the connection"
    assert server.asked == [("/v1/live?pictures=false", None)]


def test_the_key_is_sent(live_server):
    server = live_server([None])
    heard(server.url, "noria-key")
    assert server.asked == [("/v1/live?pictures=false", "Bearer noria-key")]


def test_pieces_of_any_size_and_ends_of_lines_in_names_are_read(live_server):
    said = engines_said("engine\u2028-\x85é")
    server = live_server([*(bytes([byte]) for byte in said), None])
    ((event,), _) = heard(server.url)
    assert event.engines[0].name == "engine\u2028-\x85é"


def test_nobody_there_is_away():
    with nobody() as url:
        found, words = heard(url)
    assert found == []
    assert "failed" in words or "refused" in words


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_that_is_full_or_ends_is_away(live_server, status):
    assert heard(live_server((status, refusal("come again"))).url) == ([], f"it answers {status}: come again")


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (401, refusal("no key came with it."), r"wants an API key: no key came with it\. .*--key-file FILE"),
        (404, refusal("live is off."), r"does not show its wheel: live is off\. .*frontend\.live is off there"),
        (418, refusal("\x1b[2Jno"), r"answers 418: \\x1b\[2Jno"),
        (404, b"<h1>Not Found</h1>", r"is no Noria: it answers GET /v1/live with status 404\. Name the URL"),
        (200, b"<h1>Welcome</h1>", "is no Noria"),
        (401, b"Who?", "is no Noria"),
    ],
)
def test_a_refusal_is_told_in_words(live_server, status, body, words):
    with pytest.raises(LiveError, match=words):
        heard(live_server((status, body)).url)


@pytest.mark.parametrize("said", [b"event: engines\ndata: {}\n\n", b"event: wheel\ndata: \xff\n\n"])
def test_what_is_not_understood_is_told(live_server, said):
    with pytest.raises(LiveError, match="says what this version of Noria does not understand"):
        heard(live_server([said]).url)


def test_a_line_without_end_is_not_kept(live_server):
    server = live_server([b"x" * 2**20] * 20)
    with pytest.raises(LiveError, match="lines of more than"):
        heard(server.url)


def test_what_speaks_no_http_is_away():
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer():
            connection, _ = listener.accept()
            connection.recv(1000)
            connection.sendall(b"SSH-2.0-x\r\n")
            connection.close()

        threading.Thread(target=answer, daemon=True).start()
        found, words = heard(f"http://127.0.0.1:{listener.getsockname()[1]}")
    assert found == []
    assert words


@pytest.mark.parametrize(
    "url", ["", "localhost:8000", "ftp://a", "http://", "http://a:b", "http://[::1", "http://a:99999"]
)
def test_what_is_no_url_is_refused(url):
    with pytest.raises(ConfigError, match=r"the URL is .*http://HOST:PORT"):
        checked_url(url)


def test_a_url_ends_without_a_slash():
    assert checked_url("http://host:1/noria/") == "http://host:1/noria"


@pytest.mark.parametrize(
    ("host", "url"),
    [("127.0.0.1", "http://127.0.0.1:81"), ("0.0.0.0", "http://127.0.0.1:81"), ("::", "http://[::1]:81")],
)
def test_the_settings_say_where_the_local_server_is(host, url):
    assert local_url(FrontendConfig(host=host, port=81)) == url


def test_any_free_port_is_no_url():
    with pytest.raises(ConfigError, match=r"frontend\.port is 0"):
        local_url(FrontendConfig(port=0))
