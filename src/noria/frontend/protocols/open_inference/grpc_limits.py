"""The limits of one client of gRPC's port: calls at once, time for their messages, connections.

A call counts from when its metadata has arrived, which has its key, until its response has been sent.
"""

import asyncio
import resource
from typing import Any

import grpc
from starlette.requests import Request

from noria.errors import InvalidBody
from noria.frontend.access.auth import client_id_of
from noria.frontend.access.concurrency_limits import ConcurrencyLimiter
from noria.frontend.server.connection import HEAD_TIMEOUT_S
from noria.frontend.server.connection_admission import max_grpc_connections

MAX_CALLS = 256
"""At once, to bound memory: a message has up to `frontend.max_body_bytes`."""
MAX_CALLS_PER_CLIENT = 64
MAX_STREAMS = 48
"""Calls of one connection; its client's library keeps further ones back. Fewer than the client's calls: the next call
may arrive before the end of the last one is noticed."""
_MESSAGE_TIMEOUT_S = 30.0  # as for a body over HTTP
_RETRY_AFTER_S = 5.0
_MAX_METADATA_BYTES = 16_384  # the library's own default
_MAX_IDLE_S = 75.0  # as over HTTP; libraries connect again when they need to
_KEEPALIVE_S, _KEEPALIVE_TIMEOUT_S = 60.0, 30.0  # a client that does not answer a ping has gone
# Ends what its client never reads: a call cannot be cancelled from here. Libraries connect again.
_MAX_AGE_S = 600.0


class CallLimiter:
    """Counts the calls of a front end."""

    def __init__(self) -> None:
        self._limiter = ConcurrencyLimiter("gRPC calls", MAX_CALLS, MAX_CALLS_PER_CLIENT, _RETRY_AFTER_S)

    def acquire(self, http: Request, context: Any) -> None:
        """Count a call until it has ended. Raises RateLimited."""
        client = client_id_of(http)
        self._limiter.acquire(client)
        context.add_done_callback(lambda _: self._limiter.release(client))


async def read_message(context: Any) -> bytes:
    """Return the message of a call. Raises InvalidBody if it has none, or if that takes too long."""
    try:
        async with asyncio.timeout(_MESSAGE_TIMEOUT_S):
            message = await context.read()
    except TimeoutError as error:
        raise InvalidBody(f"the message did not arrive within {_MESSAGE_TIMEOUT_S:g} s.") from error
    if message is grpc.aio.EOF:
        raise InvalidBody("the call has no message; it needs one.")
    assert isinstance(message, bytes)
    return message


def server_options(max_message_bytes: int, request_timeout_s: float) -> list[tuple[str, int]]:
    """Return the options of the library's server."""
    max_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return [
        ("grpc.so_reuseport", 1),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.absolute_max_metadata_size", _MAX_METADATA_BYTES),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.http.overload_protection", 0),  # else a library's call beyond them fails, instead of waiting
        ("grpc.max_allowed_incoming_connections", max_grpc_connections(max_files)),
        ("grpc.server_handshake_timeout_ms", _ms(HEAD_TIMEOUT_S)),
        ("grpc.max_connection_idle_ms", _ms(_MAX_IDLE_S)),
        ("grpc.max_connection_age_ms", _ms(_MAX_AGE_S)),
        ("grpc.max_connection_age_grace_ms", _ms(_MESSAGE_TIMEOUT_S + request_timeout_s)),
        ("grpc.keepalive_time_ms", _ms(_KEEPALIVE_S)),
        ("grpc.keepalive_timeout_ms", _ms(_KEEPALIVE_TIMEOUT_S)),
    ]


def _ms(seconds: float) -> int:
    return int(1000 * seconds)
