"""`noria health`: which server it asks, what it prints, and with which status it ends."""

import contextlib
import http.server
import json
import pathlib
import socket
import socketserver
import ssl
import threading
from collections.abc import Iterator

import pytest

from certificates import make_certificate
from noria.cli.main import main


class Answering(http.server.BaseHTTPRequestHandler):
    """Is alive and not ready."""

    def do_GET(self) -> None:
        is_alive = self.path == "/healthz"
        body = {"status": "alive"} if is_alive else {"ready": False, "engines": [{"state": "loading"}]}
        self.send_response(200 if is_alive else 503)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *_: object) -> None:
        pass

    def address_string(self) -> str:
        return ""


class UnixServer(socketserver.UnixStreamServer):
    """Its handlers expect a pair as the client's address."""

    def get_request(self) -> tuple[socket.socket, tuple[str, int]]:
        return super().get_request()[0], ("", 0)


@contextlib.contextmanager
def serving(server: socketserver.BaseServer) -> Iterator[None]:
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.parametrize("kind", ["TCP", "TLS", "Unix socket"])
def test_it_asks_the_server_of_the_settings_and_no_proxy(
    kind: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    server: socketserver.BaseServer
    if kind == "Unix socket":
        monkeypatch.chdir(tmp_path)
        server = UnixServer("s", Answering)
        monkeypatch.setenv("NORIA_FRONTEND_UDS", str(tmp_path / "s"))
        monkeypatch.setenv("NORIA_FRONTEND_PORT", "9")
    else:
        tcp = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answering)
        server = tcp
        monkeypatch.setenv("NORIA_FRONTEND_PORT", str(tcp.server_port))
        monkeypatch.setenv("NORIA_FRONTEND_HOST", "0.0.0.0")
        monkeypatch.setenv("NORIA_MODEL", "/no/such/model")  # is not opened
        if kind == "TLS":
            certificate = make_certificate(tmp_path)
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate.certfile, certificate.keyfile)
            tcp.socket = context.wrap_socket(tcp.socket, server_side=True)
            monkeypatch.setenv("NORIA_FRONTEND_SSL_CERTFILE", str(certificate.certfile))
            monkeypatch.setenv("NORIA_FRONTEND_SSL_KEYFILE", str(certificate.keyfile))
    with serving(server):
        assert main(["health"]) == 0
        assert main(["health", "--ready"]) == 1
    alive, ready = capsys.readouterr().out.splitlines()
    assert alive.startswith("healthy: /healthz of ") and alive.endswith(": 200 alive")
    assert ready.startswith("unhealthy: /readyz of ") and ready.endswith(": 503 engine-0 loading")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["http://127.0.0.1:9"], "refused"),
        (["--uds", "/no/such/socket"], "No such file"),
        (["--port", "0"], "picks any free port"),
        (["--port", "many"], "frontend.port"),
        (["--config", "/no/such/file"], "cannot be read"),
        (["ftp://host"], "must have the form"),
    ],
)
def test_whatever_is_wrong_is_one_line_and_status_1(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["health", *arguments]) == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("unhealthy: /healthz of ")
    assert words in line


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0-x\r\n", None])
def test_a_server_of_another_kind_and_one_that_never_answers_are_unhealthy(
    answer: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def accept() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(4096)
                if answer is None:
                    connection.recv(4096)  # until the client leaves
                else:
                    connection.sendall(answer)

        thread = threading.Thread(target=accept)
        thread.start()
        assert main(["health", f"http://127.0.0.1:{listener.getsockname()[1]}", "--timeout", "0.5"]) == 1
        thread.join()
    assert capsys.readouterr().out.count("\n") == 1
