"""`noria bench streaming`: why the reference article's StreamingResponse was slow. Takes half a minute.

A FastAPI server on uvicorn, in a process of its own, sends one body of an image's size in each mode of
`targets.reference.response_modes`. One client requests the modes in alternating rounds, so that a noisy machine affects
all equally. The server reports its own CPU time, of all threads.
"""

import contextlib
import http.client
import importlib.metadata
import io
import json
import os
import pathlib
import statistics
import sys
import time
from typing import Any

import msgspec

from noria.testing.server import running_process
from noria_bench.measurement.provenance import collect_provenance
from noria_bench.reports.provenance_text import result_line
from noria_bench.reports.table import Table, format_number
from noria_bench.targets.reference.response_modes import CHUNK_BYTES, RESPONSE_MODES
from noria_bench.targets.reference.streaming_app import StreamingJob, random_image_bytes

# The size of a 512 × 512 PNG, nearly uncompressed.
NUM_BYTES = 800_000
NUM_ROUNDS = 5
# The time for each mode in each round.
_ROUND_S = 1.0
_MIN_REPLIES = 3

# As the table names the modes.
MODE_LABELS = {
    "plain": "Response",
    "bytesio": "StreamingResponse(BytesIO)",
    "chunks": "StreamingResponse, async generator of 64 kB chunks",
    "generator": "StreamingResponse, async generator of one piece",
}


def main(output: pathlib.Path | None = None, num_bytes: int = NUM_BYTES, round_s: float = _ROUND_S) -> int:
    """Measure, print a Markdown table and write JSON to `output`; returns the exit status."""
    result = measure(num_bytes, round_s)
    if output is not None:
        output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result))
    return 0


def measure(num_bytes: int, round_s: float) -> dict[str, Any]:
    """The results as one JSON-ready document; times in milliseconds.

    Raises:
        RuntimeError: the server did not start, or sent a wrong body.

    """
    header = collect_provenance()
    header["versions"] |= {name: importlib.metadata.version(name) for name in ("fastapi", "anyio")}
    rounds: list[dict[str, dict[str, Any]]] = []

    def command(port: int) -> list[str]:
        job = msgspec.json.encode(StreamingJob(port, num_bytes, os.getpid())).decode()
        return [sys.executable, "-m", "noria_bench.targets.reference.streaming_app", job]

    with (
        running_process(command) as server,
        contextlib.closing(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)) as connection,
    ):
        client = _StreamingClient(connection, random_image_bytes(num_bytes))
        for mode in RESPONSE_MODES:
            client.measure(mode, 0.0)  # warm-up
        for number in range(NUM_ROUNDS):
            print(f"noria bench streaming: round {number + 1} of {NUM_ROUNDS}", file=sys.stderr, flush=True)
            rounds.append({mode: client.measure(mode, round_s) for mode in RESPONSE_MODES})
    return {
        **header,
        "bench": "streaming",
        "workload": {"bytes": num_bytes, "clients": 1, "rounds": NUM_ROUNDS, "round_s": round_s},
        "rounds": rounds,
        "summary": summarise(rounds, random_image_bytes(num_bytes)),
    }


class _StreamingClient:
    """A client with one persistent connection."""

    def __init__(self, connection: http.client.HTTPConnection, content: bytes) -> None:
        self._connection, self._content = connection, content

    def measure(self, mode: str, seconds: float) -> dict[str, Any]:
        """Send requests for `seconds`, at least three; returns their number and medians."""
        latencies_ms: list[float] = []
        cpu_before_s, until = float(self._get("/cpu")), time.monotonic() + seconds
        while len(latencies_ms) < _MIN_REPLIES or time.monotonic() < until:
            sent = time.perf_counter()
            content = self._get(f"/{mode}")
            latencies_ms.append(1000 * (time.perf_counter() - sent))
            if content != self._content:
                raise RuntimeError(f"{mode} sent {len(content)} bytes that are not the body's {len(self._content)}")
        cpu_s = float(self._get("/cpu")) - cpu_before_s
        return {
            "replies": len(latencies_ms),
            "latency_ms": statistics.median(latencies_ms),
            "cpu_ms": 1000 * cpu_s / len(latencies_ms),
        }

    def _get(self, path: str) -> bytes:
        self._connection.request("GET", path)
        answer = self._connection.getresponse()
        content = answer.read()
        if answer.status != 200:
            raise RuntimeError(f"GET {path} was answered {answer.status}: {content[:200]!r}")
        return content


def summarise(rounds: list[dict[str, dict[str, Any]]], content: bytes) -> dict[str, dict[str, float]]:
    """For each mode, the number of pieces it sends `content` in, and medians over the rounds."""
    num_pieces = {
        "plain": 1,
        "bytesio": sum(1 for _ in io.BytesIO(content)),  # lines
        "chunks": -(-len(content) // CHUNK_BYTES),
        "generator": 1,
    }
    return {
        mode: {
            "pieces": num_pieces[mode],
            "replies": sum(r[mode]["replies"] for r in rounds),
            "latency_ms": statistics.median(r[mode]["latency_ms"] for r in rounds),
            "cpu_ms": statistics.median(r[mode]["cpu_ms"] for r in rounds),
            "cpu_ms_min": min(r[mode]["cpu_ms"] for r in rounds),
            "cpu_ms_max": max(r[mode]["cpu_ms"] for r in rounds),
        }
        for mode in rounds[0]
    }


def table(result: dict[str, Any]) -> str:
    """The result as a Markdown table with a line of provenance."""
    workload = result["workload"]
    rows = tuple(
        (
            MODE_LABELS[mode],
            str(row["pieces"]),
            format_number(row["latency_ms"], 2),
            f"{row['cpu_ms']:.2f} ({row['cpu_ms_min']:.2f}–{row['cpu_ms_max']:.2f})",
        )
        for mode, row in result["summary"].items()
    )
    notes = (
        f"{workload['bytes'] / 1000:.0f} kB, one client; medians of {workload['rounds']} rounds (min–max). "
        + result_line(result),
    )
    columns = ("body sent by", "pieces", "latency, ms", "server's CPU, ms per reply")
    return Table("Streaming", columns, rows, notes).markdown()
