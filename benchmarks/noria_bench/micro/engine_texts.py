"""Measures what an engine process takes for one-text requests, with a model that costs nothing. Needs no device.

    python -m noria_bench.micro.engine_texts [SECONDS]

A real engine process behind its channel; two simulated front ends send as one does, all requests of a turn of its event
loop as one message, and a new request for each that is answered. A row is a number of requests in flight: texts a
second, CPU time of the engine a text, and texts that a core would do in a second. The last row is the median latency of
a lone request, and what the model alone takes of a text in batches of eight. Each number is that of the quietest of
many batches.
"""

import contextlib
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

import msgspec
import numpy as np
import zmq

from noria.config import EngineConfig
from noria.engine.encoder.sessions import load_sessions
from noria.models.catalog import open_model_of
from noria.models.encoder.tokenizers.token_rows import TokenRow
from noria.protocol.messages import (
    EngineLoad,
    EngineState,
    Finished,
    Hello,
    LoadAck,
    deserialize_from_engine,
    serialize,
)
from noria.protocol.process_signals import STOP_SIGNAL
from noria.protocol.tasks import EngineTask
from noria.protocol.text import EncoderModelSpec
from noria.protocol.transport import pack, unpack
from noria.testing.fake_encoder import make_text_request
from noria_bench.encoders.random_folder import free_model
from noria_bench.micro.http_requests import cpu_s

IN_FLIGHT = (1, 32, 128, 1000)
NUM_TOKENS, NUM_ROWS, BATCH_S = 17, 8, 0.25
NUM_CLIENTS = 2
RING = 4096  # prepared requests; more than are in flight, so that no id is in use twice


class Client:
    """A front end's end of a channel, without its work: prepared requests in, answers counted."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], address: str, name: str, spec: EncoderModelSpec
    ) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.connect(address)
        texts, version = [range(4, 4 + NUM_TOKENS)], spec.fingerprint
        self.requests = [
            serialize(make_text_request(f"{name}-{number}", *texts, model=spec, model_version=version))
            for number in range(RING)
        ]
        self._next = 0
        self.socket.send(serialize(Hello(name)))

    def send(self, count: int) -> None:
        """Send so many requests as one group."""
        numbers = range(self._next, self._next + count)
        self._next += count
        self.socket.send_multipart(pack([(self.requests[number % RING], b"") for number in numbers]))

    def receive(self) -> int:
        """Return how many requests the answers that have arrived are of; waits for none."""
        count = 0
        with contextlib.suppress(zmq.Again):
            while True:
                for message, _ in unpack(self.socket.recv_multipart(zmq.DONTWAIT)):
                    if b"Finished" in bytes(message[:20]):
                        count += 1
                    elif not isinstance(answer := deserialize_from_engine(message), EngineState):
                        assert isinstance(answer, EngineLoad), answer
                        self.socket.send(serialize(LoadAck()))
        return count


class Engine:
    """An engine process and the clients that simulate its front ends."""

    def __init__(self, stack: contextlib.ExitStack, spec: EncoderModelSpec) -> None:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="noria"))
        address = f"ipc://{folder}/engine"
        self.pid = stack.enter_context(running_engine(pathlib.Path(folder), address, spec))
        context = stack.enter_context(zmq.Context())
        self._poller = zmq.Poller()
        self.clients = [Client(context, address, f"frontend-{number}", spec) for number in range(NUM_CLIENTS)]
        for client in self.clients:
            stack.callback(client.socket.close, 0)
            state = None
            while not (isinstance(state, EngineState) and state.state == "ready"):
                state = deserialize_from_engine(client.socket.recv_multipart()[0])
            self._poller.register(client.socket, zmq.POLLIN)
        self._check(self.clients[0], spec)

    def _check(self, client: Client, spec: EncoderModelSpec) -> None:
        client.send(1)
        answer: object = None
        while not isinstance(answer, Finished):
            frames = client.socket.recv_multipart()
            answer = deserialize_from_engine(frames[0])
        assert answer.result is not None
        assert len(frames[1]) == 4 * spec.dimensions

    def run_batch(self, in_flight: int) -> tuple[float, float]:
        """Keep so many requests in flight for `BATCH_S`; return texts a second, and milliseconds of CPU time a text."""
        clients = self.clients[:in_flight]
        began, used_s, num_texts, open_ = time.perf_counter(), cpu_s(self.pid), 0, 0
        for client in clients:
            client.send(in_flight // len(clients))
            open_ += in_flight // len(clients)
        while open_:
            self._poller.poll()
            for client in clients:
                count = client.receive()
                num_texts, open_ = num_texts + count, open_ - count
                if count and time.perf_counter() - began < BATCH_S:
                    client.send(count)
                    open_ += count
        seconds, used_s = time.perf_counter() - began, cpu_s(self.pid) - used_s
        return num_texts / seconds, 1e3 * used_s / num_texts

    def lone_ms(self) -> float:
        """Return the median latency of single requests, in milliseconds."""
        client, latencies_s = self.clients[0], []
        end = time.perf_counter() + BATCH_S
        while (began := time.perf_counter()) < end:
            client.send(1)
            while not client.receive():
                client.socket.poll()
            latencies_s.append(time.perf_counter() - began)
        return 1e3 * statistics.median(latencies_s)


@contextlib.contextmanager
def running_engine(folder: pathlib.Path, address: str, spec: EncoderModelSpec) -> Iterator[int]:
    """Start an engine as the supervisor does; yields its process id."""
    (folder / "metrics").mkdir()
    task = EngineTask(EngineConfig(), (spec,), "cpu", address, "engine-0", str(folder / "in-flight"))
    environment = os.environ | {"PROMETHEUS_MULTIPROC_DIR": str(folder / "metrics")}
    command = [sys.executable, "-m", "noria.engine.process", msgspec.json.encode(task).decode()]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment) as child:
        try:
            yield child.pid
        finally:
            child.send_signal(STOP_SIGNAL)


def model_ms(spec: EncoderModelSpec) -> float:
    """Return the CPU time that the model takes of a text in a batch, in milliseconds."""
    session = load_sessions(spec, EngineConfig(), "cpu")[0]
    rows = [TokenRow(np.arange(4, 4 + NUM_TOKENS))] * NUM_ROWS
    used_s = []
    for _ in range(200):
        began = time.thread_time()
        session.run(rows)
        used_s.append(time.thread_time() - began)
    return 1e3 * min(used_s) / NUM_ROWS


def main() -> None:
    """Print the cost of a text at each number in flight."""
    seconds = float(sys.argv[1]) if sys.argv[1:] else 20.0
    spec = open_model_of(EncoderModelSpec, str(free_model("")), EngineConfig())
    rates, used_ms = dict.fromkeys(IN_FLIGHT, 0.0), dict.fromkeys(IN_FLIGHT, float("inf"))
    lone_ms = alone_ms = float("inf")
    with contextlib.ExitStack() as stack:
        engine = Engine(stack, spec)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            lone_ms, alone_ms = min(lone_ms, engine.lone_ms()), min(alone_ms, model_ms(spec))
            for in_flight in IN_FLIGHT:
                rate, ms = engine.run_batch(in_flight)
                rates[in_flight], used_ms[in_flight] = max(rates[in_flight], rate), min(used_ms[in_flight], ms)
    for in_flight in IN_FLIGHT:
        ms = used_ms[in_flight]
        print(
            f"{in_flight:5} in flight {rates[in_flight]:7.0f} texts/s {ms:.3f} ms a text {1e3 / ms:7.0f} texts/s a core"
        )
    print(f"lone {lone_ms:.2f} ms; the model alone {alone_ms:.3f} ms a text")


if __name__ == "__main__":
    main()
