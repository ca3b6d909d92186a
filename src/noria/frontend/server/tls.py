"""TLS: the certificate, which is read again when its files have changed, and the handshakes of new connections.

Each connection keeps the certificate that it began with. asyncio reports a TLS connection only after its handshake. So
this module accepts connections itself: before the handshake they have the same limits of time, number and descriptors
as others.
"""

import asyncio
import contextlib
import functools
import logging
import os
import shlex
import socket
import ssl
from collections.abc import Callable
from typing import NoReturn

from noria.config import FrontendConfig
from noria.errors import ConfigError
from noria.observe.logs.log_record import fields

# A client that does not answer the end of a connection; a slow one must have read the rest of its response by then.
CLOSE_TIMEOUT_S = 75.0
_POLL_INTERVAL_S = 2.0
_ACCEPT_RETRY_S = 0.1
_OTHERS = 0o007  # all but the owner and the group: by a group, such as ssl-cert, administrators give a service its key

log = logging.getLogger("noria.frontend")


def check_certificate(config: FrontendConfig) -> None:
    """Raise ConfigError if the configured certificate, if any, cannot be used."""
    if config.ssl_certfile:
        tls_context(config.ssl_certfile, config.ssl_keyfile)
    elif config.ssl_keyfile:
        raise ConfigError("setting frontend.ssl_keyfile needs frontend.ssl_certfile, the certificate of the key.")


def open_key_warning(config: FrontendConfig) -> str | None:
    """Return what is wrong if all users of this machine may read the private key."""
    file = config.ssl_keyfile or config.ssl_certfile
    with contextlib.suppress(OSError):
        if file and (mode := os.stat(file).st_mode & 0o7777) & _OTHERS:
            advice = f"chmod o= {shlex.quote(file)}"
            return f"all users of this machine may read the private key {file}, whose mode is {mode:o}; {advice}"
    return None


def tls_context(certfile: str, keyfile: str) -> ssl.SSLContext:
    """Return a server's context with the certificate and its key. Raises ConfigError if they cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION  # OpenSSL before 3 lets clients ask for handshakes without end
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(certfile, keyfile or None, password=_reject_passphrase)
    except OSError as error:
        key = f" and its key {keyfile}" if keyfile else ""
        raise ConfigError(
            f"the certificate {certfile}{key} cannot be used: {error}. frontend.ssl_certfile must be a PEM file with "
            "the server's certificate and the chain to its authority, frontend.ssl_keyfile one with its private key."
        ) from error
    return context


def _reject_passphrase() -> NoReturn:
    raise ConfigError(
        "the private key in frontend.ssl_keyfile has a passphrase, which cannot be typed in when the server restarts. "
        "Write it without one (openssl pkey), readable for the server's user only."
    )


class Certificate:
    """The certificate for new connections, in `context`."""

    def __init__(self, certfile: str, keyfile: str) -> None:
        """Raises ConfigError."""
        self._files = certfile, keyfile
        self._version = self._read_version()
        self.context = tls_context(certfile, keyfile)

    async def follow(self) -> None:
        """Use the files' certificate whenever they change, until cancelled; log and ignore it if it is invalid."""
        while True:
            await asyncio.sleep(_POLL_INTERVAL_S)
            version = await asyncio.to_thread(self._read_version)
            if version == self._version:
                continue
            self._version = version
            try:
                self.context = await asyncio.to_thread(tls_context, *self._files)
            except ConfigError as error:
                message = "%s The certificate of before stays in use."
                log.error(message, error.message, extra=fields(event="certificate_rejected"))
            else:
                message = "new connections get the changed certificate %s"
                log.info(message, self._files[0], extra=fields(event="certificate_loaded"))

    def _read_version(self) -> list[tuple[int, ...]]:
        """Return what differs when a file, its mode or a link to it has changed; less if one does not exist."""
        found: list[tuple[int, ...]] = []
        for file in self._files:
            with contextlib.suppress(OSError):
                status = os.stat(file)
                times = status.st_mtime_ns, status.st_ctime_ns
                found.append((status.st_dev, status.st_ino, *times, status.st_size))
        return found


class TlsServer:
    """Accepts one listening socket's connections and makes their handshakes; to uvicorn it is an asyncio.Server."""

    def __init__(
        self,
        listener: socket.socket,
        make_protocol: Callable[[contextlib.ExitStack], asyncio.Protocol],
        certificate: Certificate,
        admit: Callable[[socket.socket, str, float], contextlib.ExitStack | None],
    ) -> None:
        """Must be called in the event loop.

        `admit` gets a connection, its client's address and the time. What it returns is given to the protocol, which
        closes it, or is closed if no handshake is made; None: the connection is closed.
        """
        listener.setblocking(False)
        self._listener, self._make_protocol, self._certificate = listener, make_protocol, certificate
        self._admit = admit
        self._loop = asyncio.get_running_loop()
        self._accepting = self._loop.create_task(self._accept())
        self._handshakes: set[asyncio.Task[None]] = set()

    async def stop_accepting(self) -> None:
        """Accept no more connections; return when the handshakes of those that are accepted have ended."""
        self._accepting.cancel()
        await asyncio.gather(self._accepting, *self._handshakes, return_exceptions=True)

    def close(self) -> None:
        """Accept no more connections, and close those whose handshake has not ended."""
        for task in (self._accepting, *self._handshakes):
            task.cancel()

    async def wait_closed(self) -> None:
        """Wait until `close` has had its effect."""
        await asyncio.gather(self._accepting, *self._handshakes, return_exceptions=True)

    async def _wait_until_readable(self) -> None:
        readable = asyncio.Event()
        self._loop.add_reader(self._listener, readable.set)
        try:
            await readable.wait()
        finally:
            self._loop.remove_reader(self._listener)

    async def _accept(self) -> None:
        while True:
            await self._wait_until_readable()  # not sock_accept, which loses a connection if it is cancelled then
            try:
                client, address = self._listener.accept()
            except BlockingIOError:  # another front end has it
                continue
            except OSError:  # it has gone already, or no descriptor is left
                await asyncio.sleep(_ACCEPT_RETRY_S)
                continue
            client.setblocking(False)
            held = self._admit(client, address[0], self._loop.time())
            if held is None:
                client.close()
                continue
            handshake = self._loop.create_task(self._make_handshake(client, held))
            self._handshakes.add(handshake)
            handshake.add_done_callback(self._handshakes.discard)

    async def _make_handshake(self, client: socket.socket, held: contextlib.ExitStack) -> None:
        from noria.frontend.server.connection import HEAD_TIMEOUT_S  # not in the supervisor, which checks certificates

        try:
            await self._loop.connect_accepted_socket(
                functools.partial(self._make_protocol, held),
                client,
                ssl=self._certificate.context,
                ssl_handshake_timeout=HEAD_TIMEOUT_S,
                ssl_shutdown_timeout=CLOSE_TIMEOUT_S,
            )
        except BaseException as error:
            held.close()
            if not isinstance(error, OSError):
                raise
            log.debug("a TLS handshake failed: %s", error)  # no TLS, an old version, too slow: the transport is closed
