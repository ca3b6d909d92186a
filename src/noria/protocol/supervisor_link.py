"""The supervisor's messages to a front end or the registrar: lines of JSON through an inherited socket."""

import asyncio
import socket
from collections.abc import AsyncIterator

import msgspec
from msgspec import Struct

from noria.protocol.messages import Ping

CHILD_ALIVE = b"alive\n"
"""From a front end or the registrar to the supervisor: it has started, or answers a ping."""


class NumFrontends(Struct, frozen=True, tag=True):
    """To a front end: how many share clients and limits from now on."""

    count: int


class Retire(Struct, frozen=True, tag=True):
    """To a front end: end when all clients have left."""


async def follow_supervisor(control_fd: int) -> AsyncIterator[NumFrontends | Retire]:
    """Tell the supervisor that this process has started; answer its pings, and yield its other messages."""
    reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=control_fd))
    writer.write(CHILD_ALIVE)
    while line := await reader.readline():
        match msgspec.json.decode(line, type=NumFrontends | Retire | Ping):
            case Ping():
                writer.write(CHILD_ALIVE)
            case message:
                yield message
