"""A receiver of webhooks on loopback, and a client that posts one delivery to it."""

import contextlib
import ssl
import time

from http_servers import HttpServer
from noria.jobs.webhooks.client import WebhookClient
from noria.observe.traces.tracer import GLOBAL_TRACER

SECRET = bytes(range(32))


class Receiver(HttpServer):
    """Answers with the next of `statuses`, then 204, and records requests."""

    def __init__(self, statuses=(), certificate=None, body=b"", headers=None):
        super().__init__(self._record)
        self.received, self.server_names = [], []  # names are asked for by TLS
        self._statuses, self._body, self._headers = list(statuses), body, headers
        if certificate:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(certificate)
            context.sni_callback = lambda _socket, name, _context: self.server_names.append(name)
            self.socket = context.wrap_socket(self.socket, server_side=True)

    def _record(self, request):
        headers = {name.lower(): text for name, text in request.headers.items()}
        self.received.append((request.path, headers, request.body))
        request.send(self._body, self._statuses.pop(0) if self._statuses else 204, self._headers)

    def address(self, scheme="http"):
        """The URL of the receiver, whose host is resolved by `to_loopback`."""
        return f"{scheme}://hooks.example:{self.server_port}/"

    def handle_error(self, *_):
        """A client has given up, or has rejected the certificate."""


async def to_loopback(host, port):
    return ["127.0.0.1"]


@contextlib.asynccontextmanager
async def webhook_client(resolve=to_loopback, allow_private=True, secrets=(SECRET,), tracer=GLOBAL_TRACER):
    client = WebhookClient(secrets, allow_private=allow_private, resolve=resolve, tracer=tracer)
    try:
        yield client
    finally:
        await client.close()


async def send(delivery, now=None, **options):
    """Try once; returns why the receiver did not accept it, or None."""
    async with webhook_client(**options) as client:
        failed = await client.send(delivery, time.time() if now is None else now)
        return failed and failed.reason
