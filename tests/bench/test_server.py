"""The servers that a bench starts: nothing around the bench changes what they are."""

import json
import sys

from noria.bench.server import DIRECT, running_process

TELLING = """
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
    with running_process(lambda port: [sys.executable, "-c", TELLING, str(port)]) as server:
        told = json.loads(DIRECT.open(f"http://127.0.0.1:{server.port}/").read())
    assert "PATH" in told
    assert not [name for name in told if name.startswith("NORIA_")]
