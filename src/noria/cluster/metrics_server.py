"""The metrics of one replica, at a port of its node, and what Prometheus' HTTP service discovery reads.

Ray's own export gives metrics other names (`ray_…`) and knows no exemplars: dashboards and rules would need two forms.
"""

import contextlib
import http.server
import socket
import socketserver
import threading
from collections.abc import Callable, Iterable, Mapping
from typing import Any

_READ_TIMEOUT_S = 10.0  # seconds for a scraper that connects and asks nothing

Render = Callable[[str], tuple[bytes, str]]
"""Returns the metrics and their content type, in the format that an `Accept` header asks for."""


class MetricsServer:
    """Serves `GET /metrics` at a free port of the address `host`, in threads, until `close`."""

    def __init__(self, host: str, render: Render) -> None:
        self._server = _Server(host, _handler(render))
        self.address = f"[{host}]:{self._port}" if ":" in host else f"{host}:{self._port}"
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics", daemon=True)
        self._thread.start()

    @property
    def _port(self) -> int:
        return int(self._server.server_address[1])

    def close(self) -> None:
        """Serve no longer."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(socketserver.ThreadingTCPServer):  # http.server's own looks up the name of the host
    daemon_threads = True

    def __init__(self, host: str, handler: type[http.server.BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, 0), handler)


def _handler(render: Render) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        timeout = _READ_TIMEOUT_S

        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/metrics":
                self.send_error(404)
                return
            try:
                content, content_type = render(self.headers.get("Accept", ""))
            except OSError:  # the files are gone: the replica ends
                self.send_error(503)
                return
            self.send_response(200)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            with contextlib.suppress(ConnectionError):
                self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - its name in http.server
            """Log nothing."""

    return Handler


def targets(application: str, replicas: Mapping[str, Iterable[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Return the answer to Prometheus' HTTP service discovery: each replica's address and its labels.

    `replicas` have the metadata of each deployment's. All have one `instance`, so that rules and dashboards, which sum
    by it, see one server.
    """
    return [
        {
            "targets": [each["metrics"]],
            "labels": {
                "instance": application,
                "application": application,
                "deployment": deployment,
                "replica": each["name"],
                "node": each["metrics"].rpartition(":")[0],  # all replicas of a node have its cores and its memory
            },
        }
        for deployment, group in replicas.items()
        for each in group
        if "metrics" in each
    ]
