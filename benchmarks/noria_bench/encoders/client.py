"""The bench's own client: a closed loop of connections, or an open loop at given times. A process of its own.

`python -m noria_bench.encoders.client < config.json` prints a `ClientResult`. Replies to texts whose vector is known
are kept, and compared when the load has ended. A latency counts from the intended start. Requests that were sent are
waited for, for at most `GRACE_S`; one without an answer has failed. A closed loop ends early if nothing but errors
comes back.
"""

import asyncio
import itertools
import pathlib
import re
import sys
from collections import deque
from collections.abc import Iterator
from typing import cast

import msgspec
import numpy as np
import uvloop
from msgspec import Struct

from noria.protocol.process_signals import die_with_parent
from noria_bench.encoders.catalog import INTERFACES, Kind

GRACE_S = 20.0
_MAX_KEPT_REPLIES = 1024
# Share of a closed loop's time until it is steady: completions in it are not counted as throughput.
_RAMP = 0.2
# A closed loop of which the first so many requests fail has no sense.
_MAX_FIRST_FAILURES = 64
_MAX_ERROR_CHARS = 300
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_CLOSES = re.compile(rb"\r\nconnection: *close", re.IGNORECASE)
_HEAD = "POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{headers}Content-Length: {length}\r\n\r\n"


class ClientConfig(Struct, frozen=True):
    """The texts to send, and the server that receives them."""

    port: int
    kind: Kind
    texts: tuple[str, ...]
    vectors: str  # a file of numpy's: what the first texts should give
    seconds: float = 0.0  # duration of the load
    # A closed loop: all texts in turn, from `first` on.
    connections: int = 0
    first: int = 0
    num_requests: int | None = None  # ends the loop before its time
    # An open loop: intended starts in seconds, and the numbers of their texts.
    arrivals: tuple[tuple[float, int], ...] = ()
    waits: bool = False  # prints an empty line when it is ready, and starts when it has read a line


class ClientResult(Struct, frozen=True):
    """The outcome. Latencies are of answered requests."""

    requests_per_s: float
    latencies_s: list[float]
    num_failed: int
    failures: dict[str, int]  # by status, or what went wrong
    first_error: str = ""  # the begin of the first reply with another status than 200
    differences: list[float] = []  # for each compared vector, the largest difference of a number
    cosines: list[float] = []


class _Connection(asyncio.Protocol):
    """A keep-alive connection; `answered` is called with a status (0: it broke) and the body."""

    def __init__(self, load: "_Load") -> None:
        self._load, self._buffer, self._end = load, bytearray(), 0
        self.request: tuple[float, int] | None = None  # intended start, and the number of the text
        self.status, self._head_end, self._closes = 0, 0, False
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's is no subclass.
        self.transport = cast("asyncio.Transport", transport)

    def send(self, intended_s: float, number: int) -> None:
        """Send the request of text `number`."""
        assert self.transport is not None
        self.request = intended_s, number
        self.transport.write(self._load.requests[number])

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        if not self._end:
            self._head_end = self._buffer.find(b"\r\n\r\n")
            if self._head_end < 0:
                return
            head = bytes(self._buffer[: self._head_end])
            length = _LENGTH.search(head)
            self.status, self._closes = int(head[9:12]), _CLOSES.search(head) is not None
            self._end = self._head_end + 4 + (int(length[1]) if length else 0)
        if len(self._buffer) >= self._end:
            body = bytes(self._buffer[self._head_end + 4 : self._end])
            self._buffer.clear()
            self._end = 0
            request, self.request = self.request, None
            if request is None:
                return
            if self._closes and self.transport is not None:
                self.transport.close()
            self._load.answered(self, request, self.status, body, reusable=not self._closes)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        request, self.request = self.request, None
        if request is not None:
            self._load.answered(self, request, 0, b"", reusable=False)


class _Load:
    """The state of a run."""

    def __init__(self, config: ClientConfig) -> None:
        interface = INTERFACES[config.kind]
        self.config, self.requests = config, list[bytes]()
        headers = "".join(f"{name}: {value}\r\n" for name, value in interface.headers.items())
        for text in config.texts:
            body = interface.body(text)
            self.requests.append(_HEAD.format(path=interface.path, headers=headers, length=len(body)).encode() + body)
        self.vectors = np.load(pathlib.Path(config.vectors))
        self.latencies_s, self.ends_s = list[float](), list[float]()
        self.failures: dict[str, int] = {}
        self.first_error = ""
        self.kept: list[tuple[int, bytes]] = []
        self.loop, self.start_s, self.in_flight = asyncio.get_running_loop(), 0.0, 0
        self.connections, self.idle = list[_Connection](), deque[_Connection]()
        self.reconnections = set[asyncio.Task[None]]()
        self.ended = asyncio.Event()
        self.sends_more = True
        self.numbers: Iterator[int] = iter(())

    def now(self) -> float:
        return self.loop.time() - self.start_s

    async def connect(self) -> _Connection:
        _, connection = await self.loop.create_connection(lambda: _Connection(self), "127.0.0.1", self.config.port)
        self.connections.append(connection)
        return connection

    async def close(self) -> None:
        """Close all connections, also those that are being made; uvloop does not end with open ones."""
        if self.reconnections:
            await asyncio.wait(self.reconnections, timeout=GRACE_S)
        for connection in self.connections:
            if connection.transport is not None:
                connection.transport.abort()
        await asyncio.sleep(0)

    def answered(
        self, connection: _Connection, request: tuple[float, int], status: int, body: bytes, *, reusable: bool
    ) -> None:
        """Record an answer, and send the next request of a closed loop."""
        self.in_flight -= 1
        now_s, number = self.now(), request[1]
        if status == 200:
            self.latencies_s.append(now_s - request[0])
            self.ends_s.append(now_s)
            if number < len(self.vectors) and len(self.kept) < _MAX_KEPT_REPLIES:
                self.kept.append((number, body))
        else:
            self.first_error = self.first_error or body[:_MAX_ERROR_CHARS].decode(errors="replace")
            self.count_failure(str(status) if status else "connection broken")
        if self.config.arrivals:
            if reusable:
                self.idle.append(connection)
        elif reusable:
            self.send_next(connection)
        elif self.sends_more:
            task = self.loop.create_task(self.reconnect())
            self.reconnections.add(task)
            task.add_done_callback(self.reconnected)
        self.end_if_done()

    def count_failure(self, reason: str) -> None:
        self.failures[reason] = self.failures.get(reason, 0) + 1
        if not self.config.arrivals and not self.latencies_s and sum(self.failures.values()) >= _MAX_FIRST_FAILURES:
            self.sends_more = False

    def end_if_done(self) -> None:
        if not self.sends_more and not self.in_flight:
            self.ended.set()

    def reconnected(self, task: asyncio.Task[None]) -> None:
        self.reconnections.remove(task)
        if not task.cancelled():
            task.result()

    async def reconnect(self) -> None:
        try:
            connection = await self.connect()
        except OSError:
            self.count_failure("no connection")
            await asyncio.sleep(0.05)
            if self.sends_more and self.now() < self.config.seconds:
                await self.reconnect()
            self.end_if_done()
            return
        self.send_next(connection)

    def send_next(self, connection: _Connection) -> None:
        now_s = self.now()
        number = next(self.numbers, None) if self.sends_more and now_s < self.config.seconds else None
        if number is None:
            self.sends_more = False
            self.end_if_done()
            return
        self.in_flight += 1
        connection.send(now_s, number)

    async def run_closed(self) -> None:
        config = self.config
        numbers = itertools.islice(itertools.cycle(range(len(config.texts))), config.first % len(config.texts), None)
        self.numbers = numbers if config.num_requests is None else itertools.islice(numbers, config.num_requests)
        connections = [await self.connect() for _ in range(config.connections)]
        self.start_s = self.loop.time()
        for connection in connections:
            self.send_next(connection)
        await self.wait(config.seconds + GRACE_S)

    async def run_open(self) -> None:
        self.start_s = self.loop.time() + 0.1
        for intended_s, number in self.config.arrivals:
            await asyncio.sleep(intended_s - self.now())
            self.in_flight += 1
            try:
                while self.idle:
                    connection = self.idle.popleft()
                    if connection.transport is not None and not connection.transport.is_closing():
                        break
                else:
                    connection = await self.connect()
            except OSError:
                self.in_flight -= 1
                self.count_failure("no connection")
                continue
            connection.send(intended_s, number)
        self.sends_more = False
        self.end_if_done()
        await self.wait(self.now() + GRACE_S)

    async def wait(self, until_s: float) -> None:
        try:
            await asyncio.wait_for(self.ended.wait(), until_s - self.now())
        except TimeoutError:
            self.failures["no answer"] = self.in_flight

    def result(self) -> ClientResult:
        """The outcome; compares what was kept."""
        config, compared = self.config, [self.compare(number, body) for number, body in self.kept]
        if config.arrivals or config.num_requests is not None:
            # An open loop may end with a gap.
            last_s = max([*self.ends_s, config.seconds if config.arrivals else 0.0])
            rate = len(self.ends_s) / last_s if last_s else 0.0
        else:
            ramp_s = _RAMP * config.seconds
            rate = sum(ramp_s <= end_s < config.seconds for end_s in self.ends_s) / (config.seconds - ramp_s)
        return ClientResult(
            requests_per_s=rate,
            latencies_s=self.latencies_s,
            num_failed=sum(self.failures.values()),
            failures=self.failures,
            first_error=self.first_error,
            differences=[difference for difference, _ in compared],
            cosines=[cosine for _, cosine in compared],
        )

    def compare(self, number: int, body: bytes) -> tuple[float, float]:
        """The largest difference of a reply's vector, and its cosine; of an unreadable one infinity (as 1e9) and -1."""
        right = self.vectors[number]
        try:
            got = np.array(INTERFACES[self.config.kind].vector(body), np.float32)
            difference = float(np.abs(got - right).max())
        except (msgspec.DecodeError, LookupError, TypeError, ValueError):
            return 1e9, -1.0
        cosine = float(got @ right / max(1e-9, float(np.linalg.norm(got) * np.linalg.norm(right))))
        return (difference, cosine) if np.isfinite(difference) else (1e9, -1.0)


async def run(config: ClientConfig) -> ClientResult:
    """Send the requests; returns what came of them."""
    load = _Load(config)
    await (load.run_open() if config.arrivals else load.run_closed())
    result = load.result()
    await load.close()
    return result


def main() -> None:
    """Read the config from stdin, send the requests, print the result. The process ends with its parent."""
    die_with_parent()
    config = msgspec.json.decode(sys.stdin.buffer.readline(), type=ClientConfig)
    if config.waits:
        print(flush=True)
        sys.stdin.buffer.readline()
    sys.stdout.buffer.write(msgspec.json.encode(uvloop.run(run(config))))


if __name__ == "__main__":
    main()
