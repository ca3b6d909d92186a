"""`noria health`: asks the server of these settings whether it serves, for health checks of containers and services."""

import argparse
import http.client
import json
import socket
import ssl
from typing import Any
from urllib.parse import urlsplit

from noria.cli.parser import Parser, add_command, add_settings, argument_type, config_from
from noria.cli.server_address import ADDRESS_SETTINGS, checked_url, local_url
from noria.errors import ConfigError
from noria.observe.terminal_text import escape_for_terminal

_DEFAULT_TIMEOUT_S = 2.0
_MAX_BODY_BYTES = 65_536


def add_to(commands: Any) -> list[Parser]:
    """Add the command; returns its parser."""
    usage = "[URL] [--ready] [--timeout SECONDS]"
    parser = add_command(commands, "health", run, usage, "ask a server whether it is alive, for health checks")
    parser.add_argument(
        "url", metavar="URL", nargs="?", help="of the server (the settings' address: http://127.0.0.1:8000)"
    )
    parser.add_argument("--ready", action="store_true", help="ask whether its engines are ready: /readyz, not /healthz")
    parser.add_argument(
        "--timeout", metavar="SECONDS", type=argument_type(_seconds), default=_DEFAULT_TIMEOUT_S,
        help=f"how long to wait for the answer ({_DEFAULT_TIMEOUT_S:g})",
    )  # fmt: skip
    add_settings(parser, *ADDRESS_SETTINGS)
    return [parser]


def run(arguments: argparse.Namespace) -> int:
    """Print one line and return 0 if the server is alive, else 1.

    Its address comes from the file, the variables and the flags of `noria serve`. No proxy is used, and no API key
    needed.
    """
    path = "/readyz" if arguments.ready else "/healthz"
    try:
        url = local_url(config_from(arguments).frontend) if arguments.url is None else checked_url(arguments.url)
        status, reason = _ask(url, path, arguments.timeout)
    except ConfigError as error:
        status, url, reason = None, "the settings", error.message
    except (OSError, http.client.HTTPException) as error:
        status, reason = None, str(error) or type(error).__name__
    answer = f"{path} of {url}: {reason if status is None else f'{status} {reason}'}"
    print(f"{'healthy' if status == http.client.OK else 'unhealthy'}: {escape_for_terminal(' '.join(answer.split()))}")
    return 0 if status == http.client.OK else 1


def _seconds(text: str) -> float:
    if not 0 < (seconds := float(text)) <= 3600:
        raise ValueError(f"{text} is not within 0 and 3600 seconds")
    return seconds


def _ask(url: str, path: str, timeout_s: float) -> tuple[int, str]:
    """Return the status and what the body says. Raises OSError and HTTPException."""
    connection = _connection(url, timeout_s)
    try:
        connection.request("GET", path if url.startswith("unix:") else urlsplit(url).path + path)
        response = connection.getresponse()
        return response.status, _described(response.read(_MAX_BODY_BYTES)) or response.reason
    finally:
        connection.close()


def _connection(url: str, timeout_s: float) -> http.client.HTTPConnection:
    if url.startswith("unix:"):
        return _UnixConnection(url.removeprefix("unix:"), timeout_s)
    address = urlsplit(url)
    assert address.hostname is not None
    if address.scheme == "http":
        return http.client.HTTPConnection(address.hostname, address.port, timeout=timeout_s)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE  # its names are the clients'; nothing secret is sent
    return http.client.HTTPSConnection(address.hostname, address.port, timeout=timeout_s, context=tls)


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: str, timeout_s: float) -> None:
        super().__init__("localhost", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        """Connect to the socket. Raises OSError."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def _described(body: bytes) -> str:
    """Return the states in a body of /readyz or /healthz in one line; empty if it has none."""
    try:
        members = json.loads(body)
        engines = [f"engine-{index} {engine['state']}" for index, engine in enumerate(members.get("engines", ()))]
    except (ValueError, AttributeError, KeyError, TypeError):
        return ""
    told = [members.get("status"), *engines, members.get("jobs_unavailable")]
    return ", ".join(text for text in told if isinstance(text, str))
