"""The listening socket, which the supervisor opens and front ends share."""

import asyncio
import contextlib
import errno
import socket

from noria.errors import ConfigError, short_repr

_BACKLOG = 2048


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
