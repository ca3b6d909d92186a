"""`noria bench neighbours`: how much longer a quiet client waits while each attack runs on the same server.

Windows with and without the attack alternate; the median window of each kind counts. The p99 of a client alone that is
below ten of its medians counts as ten medians: /healthz is answered in less than a millisecond, and the p99 of a quiet
machine is that of its scheduler, which varies as much between two runs.
"""

import contextlib
import functools
import http.client
import json
import pathlib
import ssl
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec
from msgspec import Struct

from noria.config import Config
from noria.testing.server import reserve_port, running_server
from noria_bench.measurement.provenance import collect_provenance
from noria_bench.measurement.run_metrics import percentile
from noria_bench.reports.table import MISSING, Table
from noria_bench.running import in_background, write_json
from noria_bench.soak import heaps
from noria_bench.soak.attacks import ATTACKS, Attack, idle_connections, lineage_events, tarpit_webhooks
from noria_bench.soak.grpc_attacks import calls_without_message
from noria_bench.soak.options import NeighbourOptions

ALLOWED_GROWTH = 3.0
NEIGHBOUR_ATTACKS: Mapping[str, Attack] = MappingProxyType(
    {**ATTACKS, "tarpit webhooks": tarpit_webhooks, "lineage events": lineage_events}
)
GRPC_ATTACKS: Mapping[str, Attack] = MappingProxyType(
    {"idle gRPC connections": idle_connections, "calls without message": calls_without_message}
)
QUIET_REQUESTS: Mapping[str, tuple[int, object]] = MappingProxyType(
    {"/healthz": (400, None), "/v1/embeddings": (100, {"input": "a cat", "model": "minilm"})}
)
"""By path: the least requests of a window, and their body."""

_FLAGS = ("--additional-models", "minilm", "--webhook-allow-private", "--log-level", "error")
_REQUESTS_PER_WINDOW = 40  # at least
_FLOOR_MEDIANS = 10
_ATTEMPTS = 3  # another program may take the machine for a moment


class Windows(Struct, frozen=True):
    """How often and how long a quiet client is measured, alone and beside an attack."""

    number: int = 5
    min_s: float = 1.0  # so that the p99 is not that of the moment in which an attack begins


ALL_WINDOWS = Windows()


class Growth(Struct, frozen=True):
    """The waits of a quiet client."""

    median_s: float  # alone
    p99_s: float  # alone
    attacked_p99_s: float

    @property
    def factor(self) -> float:
        """The p99 beside the attack, over that alone, or ten medians."""
        return self.attacked_p99_s / max(self.p99_s, _FLOOR_MEDIANS * self.median_s)


def main(config: Config, options: NeighbourOptions, folder: pathlib.Path) -> int:
    """Measure the part, print a table, write JSON into `folder`; return 1 if a client waits too long for attacks."""
    return heaps.main(config, options, folder) if options.part == "heaps" else measure_attacks(folder)


def measure_attacks(folder: pathlib.Path) -> int:
    """Measure all attacks, print a table, write neighbours.json into `folder`; return 1 if a client waits too long."""
    folder.mkdir(parents=True, exist_ok=True)
    header = collect_provenance()
    measured: dict[str, dict[str, Any]] = {}
    try:
        with serving() as ports:
            for name in (*NEIGHBOUR_ATTACKS, *GRPC_ATTACKS):
                measured[name] = {path: measure_attack(ports, name, path) for path in QUIET_REQUESTS}
    finally:  # what was measured is kept
        result = {**header, "bench": "neighbours", "allowed_growth": ALLOWED_GROWTH, "attacks": measured}
        write_json(result, folder / "neighbours.json")
        print(table(measured).markdown())
    return int(any(each["growths"][-1] > ALLOWED_GROWTH for paths in measured.values() for each in paths.values()))


@contextlib.contextmanager
def serving() -> Iterator[tuple[int, int]]:
    """Serve the bundled model and an encoder; yields the ports of HTTP and of gRPC."""
    with reserve_port() as grpc_port, running_server(["bundled", *_FLAGS, "--grpc-port", str(grpc_port)]) as server:
        yield server.port, grpc_port


def measure_attack(ports: tuple[int, int], name: str, path: str) -> dict[str, Any]:
    """The waits beside one attack: its growths, the last one within the bound or the third, and the last seconds."""
    port, grpc_port = ports
    attacked_port = grpc_port if name in GRPC_ATTACKS else port
    attack, (num_requests, body) = {**NEIGHBOUR_ATTACKS, **GRPC_ATTACKS}[name], QUIET_REQUESTS[path]
    run = functools.partial(attack, attacked_port)
    try:
        measured = grow_until_allowed(lambda: measure_growth(port, run, path, num_requests, body=body))
    except RuntimeError as error:
        raise RuntimeError(f"during the attack {name!r}, {error}") from error
    return {**msgspec.structs.asdict(measured[-1]), "growths": [round(each.factor, 3) for each in measured]}


def grow_until_allowed(measure: Callable[[], Growth]) -> Sequence[Growth]:
    """Return measurements up to the first whose growth is allowed, three at most."""
    measured = [measure()]
    while measured[-1].factor > ALLOWED_GROWTH and len(measured) < _ATTEMPTS:
        measured.append(measure())
    return measured


def table(measured: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> Table:
    """The last growth of each attack, by path."""
    paths = tuple(QUIET_REQUESTS)
    rows = []
    for name, of_paths in measured.items():
        growths = [of_paths[path]["growths"][-1] if path in of_paths else None for path in paths]
        rows.append((name, *(MISSING if each is None else f"{each:.2f}" for each in growths)))
    return Table("Growth of a quiet client's p99", ("attack", *paths), tuple(rows))


def measure_growth(
    port: int,
    attack: Callable[[threading.Event], None],
    path: str = "/healthz",
    requests_per_window: int = _REQUESTS_PER_WINDOW,
    *,
    tls: ssl.SSLContext | None = None,
    body: object = None,
    windows: Windows | None = None,
) -> Growth:
    """Return the waits of a client with and without `attack`, which runs until its event is set.

    The client posts `body`, or gets `path`.
    """
    windows = windows or ALL_WINDOWS
    p99_quiet_s, p99_attacked_s, quiet_s = [], [], []
    measure = functools.partial(
        _request_durations_s, port, path, requests_per_window, tls=tls, body=body, min_s=windows.min_s
    )
    for _ in range(windows.number):
        durations_s = measure()
        quiet_s += durations_s
        p99_quiet_s.append(percentile(durations_s, 0.99))
        with in_background(attack):
            p99_attacked_s.append(percentile(measure(), 0.99))
    return Growth(statistics.median(quiet_s), statistics.median(p99_quiet_s), statistics.median(p99_attacked_s))


def _request_durations_s(
    port: int, path: str, num_requests: int, *, tls: ssl.SSLContext | None, body: object, min_s: float
) -> list[float]:
    method, content = ("GET", None) if body is None else ("POST", json.dumps(body))
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    if tls is not None:
        connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=120, context=tls)
    durations_s: list[float] = []
    with contextlib.closing(connection):
        ends_at = time.perf_counter() + min_s
        while len(durations_s) < num_requests or time.perf_counter() < ends_at:
            started = time.perf_counter()
            connection.request(method, path, content, {"Content-Type": "application/json"})
            response = connection.getresponse()
            response.read()
            durations_s.append(time.perf_counter() - started)
            if response.status != 200:
                raise RuntimeError(f"the quiet client's {method} {path} got {response.status}")
    return durations_s
