"""The servers that tests and benches start: the environment does not change them."""

import json
import socket
import subprocess
import sys

import psutil
import pytest

from noria.testing.server import NO_PROXY_OPENER, RunningServer, reserve_port, running_process
from waiting import wait_until

ENVIRONMENT_SERVER = """
import http.server, json, os, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(dict(os.environ)).encode())

    def log_message(self, *_):
        pass

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_no_setting_of_the_environment_reaches_a_server_and_proxies_are_not_used(monkeypatch):
    monkeypatch.setenv("NORIA_ENGINE_SLOTS", "4")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # where nothing listens
    monkeypatch.delenv("no_proxy", raising=False)
    with running_process(lambda port: [sys.executable, "-c", ENVIRONMENT_SERVER, str(port)]) as server:
        environment = json.loads(NO_PROXY_OPENER.open(f"http://127.0.0.1:{server.port}/").read())
    assert "PATH" in environment
    assert not [name for name in environment if name.startswith("NORIA_")]


def test_the_port_of_a_starting_server_is_reserved_for_it():
    """The kernel assigns a bound port to no other process; the server can still bind it and listen."""
    with reserve_port() as port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            with socket.socket() as server:
                server.setsockopt(socket.SOL_SOCKET, option, 1)
                server.bind(("127.0.0.1", port))
                server.listen()
                with socket.create_connection(("127.0.0.1", port)):
                    pass


def test_a_zombie_among_the_children_has_no_role():
    with subprocess.Popen(["true"]) as child:
        wait_until(lambda: psutil.Process(child.pid).status() == psutil.STATUS_ZOMBIE)
        assert RunningServer(0, 0.0, psutil.Process()).children("frontend") == []
