"""The servers that a bench starts: nothing around the bench changes what they are."""

import json
import socket
import subprocess
import sys

import psutil
import pytest

from noria_bench.load.load_generators import has_ended
from noria_bench.targets.server import NO_PROXY_OPENER, RunningServer, _free_port, running_process
from waiting import wait_until

ENVIRONMENT_SERVER = """
import http.server, json, os, sys

class Telling(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(dict(os.environ)).encode())

    def log_message(self, *_):
        pass

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Telling).serve_forever()
"""


def test_no_setting_of_the_environment_reaches_a_server_and_no_proxy_stands_before_it(monkeypatch):
    monkeypatch.setenv("NORIA_ENGINE_SLOTS", "4")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # where nobody listens
    monkeypatch.delenv("no_proxy", raising=False)
    with running_process(lambda port: [sys.executable, "-c", ENVIRONMENT_SERVER, str(port)]) as server:
        environment = json.loads(NO_PROXY_OPENER.open(f"http://127.0.0.1:{server.port}/").read())
    assert "PATH" in environment
    assert not [name for name in environment if name.startswith("NORIA_")]


def test_the_port_of_a_server_that_is_still_starting_is_kept_for_it():
    """The kernel gives nobody who asks for any port one that is bound; the server binds it all the same, and listens."""
    with _free_port() as port:
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port))
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            with socket.socket() as server:
                server.setsockopt(socket.SOL_SOCKET, option, 1)
                server.bind(("127.0.0.1", port))
                server.listen()
                with socket.create_connection(("127.0.0.1", port)):
                    pass


def test_a_process_of_a_server_that_has_ended_calls_itself_nothing():
    with subprocess.Popen(["true"]) as child:
        wait_until(lambda: has_ended(psutil.Process(child.pid)))
        assert RunningServer(0, 0.0, psutil.Process()).children("frontend") == []
