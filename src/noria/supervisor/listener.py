"""The listening sockets, which the supervisor opens and front ends share, and how many more they may open."""

import asyncio
import contextlib
import errno
import fcntl
import ipaddress
import logging
import os
import pathlib
import re
import resource
import socket
import ssl
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

from noria.config import FrontendConfig
from noria.errors import ConfigError, UnavailableNow, short_repr
from noria.extras import check_installed
from noria.frontend.server.tls import open_key_warning
from noria.observe.logs.log_record import fields

_BACKLOG = 2048
_MAX_UDS_BYTES = 107  # the kernel's, less a zero at the end
_LOCK_TIMEOUT_S = 5.0  # a server that starts holds the lock for milliseconds
_LOCK_RETRY_S = 0.05

log = logging.getLogger("noria.supervisor")


@contextlib.contextmanager
def open_listeners(config: FrontendConfig) -> Iterator[list[socket.socket]]:
    """Open the server's socket and, if it has an address of its own, that of the metrics; close them at the end.

    Raises ConfigError, and MissingExtra for gRPC.
    """
    with contextlib.ExitStack() as opened:
        check_uds(config.uds)
        first = _unix_listener(pathlib.Path(config.uds)) if config.uds else listen(config.host, config.port)
        listeners = [opened.enter_context(first)]
        if config.metrics_address:
            listeners.append(opened.enter_context(_listen_for_metrics(config.metrics_address)))
            if not config.uds and listeners[0].getsockname()[1] == listeners[1].getsockname()[1]:
                raise ConfigError(  # front ends know by the port what a request may ask for
                    f"setting frontend.metrics_address is {config.metrics_address!r}, the server's own port; "
                    "choose another."
                )
        if config.grpc_port:
            opened.enter_context(_hold_grpc_port(config.host, config.grpc_port))
        yield listeners


def warn_if_open(listener: socket.socket, config: FrontendConfig) -> None:
    """Log a warning if all may read the certificate's key, or if other machines reach a server without API keys."""
    if warning := open_key_warning(config):
        log.warning(warning, extra=fields(event="key_open_to_others"))
    if listener.family == socket.AF_UNIX or config.api_keys_file:
        return
    address = listener.getsockname()[0]
    if not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        log.warning(
            "the server listens on %s without API keys: any machine that reaches it may generate images, and see and "
            "cancel those of others. See `noria key` and frontend.api_keys_file",
            address,
            extra=fields(event="open_without_keys", address=address),
        )


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on `host` and `port`; port 0 is any free one.

    Raises ConfigError where that fails, UnavailableNow if the port is taken.
    """
    kind = ConfigError
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        # On `::` IPv4 clients are accepted too.
        is_dualstack = host == "::" and socket.has_dualstack_ipv6()
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG, dualstack_ipv6=is_dualstack)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            kind = UnavailableNow
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
        raise kind(f"{message} (in a file: frontend.host, frontend.port).") from error
    except ValueError as error:  # the IDNA encoding of the name failed before any lookup
        raise ConfigError(f"host is {short_repr(host)}, which is no address or host name: {error}.") from error


def check_uds(path: str) -> None:
    """Raise ConfigError if `frontend.uds` is set to a path that is relative, too long, or ambiguous in `unix:PATH`."""
    num_bytes = len(path.encode(errors="replace"))
    is_allowed = re.match(r"/[^/][^?#]*\Z", path) and path.isprintable() and num_bytes <= _MAX_UDS_BYTES
    if path and not is_allowed:
        raise ConfigError(
            f"setting frontend.uds is {short_repr(path)}, of {num_bytes} bytes; allowed is an absolute path of at most "
            f"{_MAX_UDS_BYTES} bytes without ?, # and control characters, such as /run/noria/noria.sock."
        )


@contextlib.contextmanager
def _unix_listener(path: pathlib.Path) -> Iterator[socket.socket]:
    """Listen on a Unix socket that its owner and group may use; remove its file at the end, if it is still this one.

    The file of a server that was killed is replaced. Raises ConfigError, also if another server listens there.
    """
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            with _locked(path.parent):
                _remove_if_unused(path)
                listener.bind(str(path))
                path.chmod(0o660)  # before `listen`: no client can connect until then
                listener.listen(_BACKLOG)
            identity = _identity(path)
        except OSError as error:
            reason = error.strerror or error
            if error.errno == errno.EADDRINUSE:
                reason = "another server listens there, or it is a file of another kind"
            raise ConfigError(
                f"cannot listen on the Unix socket {short_repr(str(path))} (frontend.uds): {reason}. Its folder must "
                "exist and be writable for this user."
            ) from error
        try:
            yield listener
        finally:
            with contextlib.suppress(OSError):
                if _identity(path) == identity:
                    path.unlink()


def _identity(path: pathlib.Path) -> tuple[int, ...]:
    """Return what a successor of the same name has not: an inode alone is used again at once. Raises OSError."""
    status = path.stat()
    return status.st_dev, status.st_ino, status.st_mtime_ns


@contextlib.contextmanager
def _locked(folder: pathlib.Path) -> Iterator[None]:
    """Hold a lock of `folder`, so that of two servers that start at once none removes the socket of the other.

    Raises ConfigError if another process, of any user that may read the folder, keeps it locked.
    """
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        give_up_at = time.monotonic() + _LOCK_TIMEOUT_S
        while not _try_lock(fd):
            if time.monotonic() > give_up_at:
                raise ConfigError(
                    f"the folder {short_repr(str(folder.absolute()))} of the Unix socket (frontend.uds) is locked by "
                    "another process, which `lslocks` names. Choose a folder that only this user can open."
                )
            time.sleep(_LOCK_RETRY_S)
        yield
    finally:
        os.close(fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_if_unused(path: pathlib.Path) -> None:
    """Remove the file of a Unix socket on which no process listens."""
    if path.is_socket():
        with socket.socket(socket.AF_UNIX) as client:
            client.setblocking(False)  # a full backlog means that somebody listens
            with contextlib.suppress(BlockingIOError):
                try:
                    client.connect(str(path))
                except ConnectionRefusedError:
                    path.unlink()


def _hold_grpc_port(host: str, port: int) -> socket.socket:
    """Return a socket that never listens and keeps the port for front ends, which bind it with SO_REUSEPORT, too.

    gRPC cannot take over a listening socket. Raises ConfigError if another process listens there: with SO_REUSEPORT two
    servers could share a port without knowing; and MissingExtra without the library.
    """
    check_installed(("grpc",), "grpc", "gRPC (frontend.grpc_port)")
    try:
        listen(host, port).close()
    except ConfigError as error:
        raise type(error)(f"gRPC (frontend.grpc_port): {error.message}") from error
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    holder = socket.socket(family)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    holder.bind(address)
    return holder


def _listen_for_metrics(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    if not host or not re.fullmatch(r"[0-9]{1,5}", port) or int(port) > 65535:
        raise ConfigError(
            f"setting frontend.metrics_address is {short_repr(address)}; allowed is ADDRESS:PORT, such as "
            "127.0.0.1:9464 or [::1]:9464."
        )
    return listen(host.removeprefix("[").removesuffix("]"), int(port))


def raise_file_limit() -> None:
    """Allow this process and its children as many open files as the system lets them have; each connection is one.

    The usual soft limit of 1024 is for programs that use select(2).
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def server_url(listener: socket.socket, *, has_tls: bool) -> str:
    """Return a server's URL for clients on this machine, without a trailing slash; of a Unix socket `unix:PATH`."""
    address = listener.getsockname()
    if isinstance(address, str):
        return f"unix:{address}"
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(address[0], address[0])  # noqa: S104 - a wildcard includes loopback
    return f"{'https' if has_tls else 'http'}://{f'[{host}]' if ':' in host else host}:{address[1]}"


async def wait_until_answering(url: str) -> None:
    """Return once a front end has answered an HTTP request, with any status. `url` is as of `server_url`."""
    address = urlsplit(url)
    tls = None
    if address.scheme == "https":
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE  # nothing is sent that others may not see
    while True:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            if address.scheme == "unix":
                reader, writer = await asyncio.open_unix_connection(address.path)
            else:
                reader, writer = await asyncio.open_connection(address.hostname, address.port, ssl=tls)
            try:
                # This path is logged at debug level: in the log the probe would look like a stranger.
                writer.write(b"HEAD /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                await reader.readexactly(5)
                return
            finally:
                writer.close()
        await asyncio.sleep(0.1)
