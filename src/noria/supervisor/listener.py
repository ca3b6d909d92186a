"""The listening sockets, which the supervisor opens and front ends share, and how many more they may open."""

import asyncio
import contextlib
import errno
import ipaddress
import logging
import re
import resource
import socket
from collections.abc import Iterator

from noria.config import FrontendConfig
from noria.errors import ConfigError, short_repr
from noria.observe.logs.setup import fields

_BACKLOG = 2048

log = logging.getLogger("noria.supervisor")


@contextlib.contextmanager
def open_listeners(config: FrontendConfig) -> Iterator[list[socket.socket]]:
    """Open the server's socket and, if it has an address of its own, that of the metrics; close them at the end.

    Logs a warning if other machines can reach a server without API keys. Raises ConfigError.
    """
    with contextlib.ExitStack() as opened:
        listeners = [opened.enter_context(listen(config.host, config.port))]
        if config.metrics_address:
            listeners.append(opened.enter_context(_listen_for_metrics(config.metrics_address)))
            if listeners[0].getsockname()[1] == listeners[1].getsockname()[1]:
                raise ConfigError(  # front ends know by the port what a request may ask for
                    f"setting frontend.metrics_address is {config.metrics_address!r}, the server's own port; choose another."
                )
        address = listeners[0].getsockname()[0]
        if not config.api_keys_file and not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            log.warning(
                "the server listens on %s without API keys: any machine that reaches it may generate images, and see and "
                "cancel those of others. See `noria key` and frontend.api_keys_file",
                address,
                extra=fields(event="open_without_keys", address=address),
            )
        yield listeners


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on `host` and `port`; port 0 is any free one.

    Raises ConfigError where that fails.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        # On `::` IPv4 clients are accepted too.
        is_dualstack = host == "::" and socket.has_dualstack_ipv6()
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG, dualstack_ipv6=is_dualstack)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            message = (
                f"port {port} on {host} is taken by another process. "
                "Choose another with --port N, or --port 0 for any free one"
            )
        elif error.errno == errno.EACCES:
            message = (
                f"port {port} is not open to this user: ports below 1024 need privileges. Choose another with --port N"
            )
        else:
            message = f"cannot listen on {host}, port {port}: {error.strerror}. --host takes an address of this machine"
        raise ConfigError(f"{message} (in a file: frontend.host, frontend.port).") from error
    except ValueError as error:  # the IDNA encoding of the name failed before any lookup
        raise ConfigError(f"host is {short_repr(host)}, which is no address or host name: {error}.") from error


def _listen_for_metrics(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    if not host or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise ConfigError(
            f"setting frontend.metrics_address is {short_repr(address)}; allowed is ADDRESS:PORT, such as 127.0.0.1:9464 "
            "or [::1]:9464."
        )
    return listen(host.removeprefix("[").removesuffix("]"), int(port))


def raise_file_limit() -> None:
    """Allow this process and its children as many open files as the system lets them have; each connection is one.

    The usual soft limit of 1024 is for programs that use select(2).
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def connect_host(host: str) -> str:
    """Return the host to connect to for a socket bound to `host`: the loopback address for a wildcard."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - a wildcard includes loopback


def server_url(host: str, port: int) -> str:
    """Return the server's URL without a trailing slash; an IPv6 address is put into brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


async def wait_until_answering(host: str, port: int) -> None:
    """Return once a front end has answered an HTTP request, with any status."""
    while True:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(f"HEAD / HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
                await reader.readexactly(5)
                return
            finally:
                writer.close()
        await asyncio.sleep(0.1)
