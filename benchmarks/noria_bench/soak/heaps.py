"""`noria bench neighbours --part heaps`: how small requests fare while another client keeps a heap in flight.

Each target serves in turn: one small client alone, all small clients, the heap alone, all small clients beside the
heap, and one beside it. Every client has an API key of its own where the target knows keys. A client's slowdown is the
mean time of its requests beside others over that on an idle server.
"""

import contextlib
import math
import pathlib
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import httpx
import msgspec
from msgspec import Struct

from noria.config import Config
from noria.frontend.access.api_keys import generate_key
from noria.testing.server import RunningServer
from noria_bench.load.closed_loop import HEADERS, Reply, run_closed_loop
from noria_bench.load.protocols import encode_request
from noria_bench.measurement.provenance import collect_provenance
from noria_bench.measurement.run_metrics import percentile
from noria_bench.reports.provenance_text import result_line
from noria_bench.reports.table import Table, format_number
from noria_bench.running import make_results_folder, open_both_models, run_to_end, status_log, write_json
from noria_bench.soak.options import ARRIVAL, NeighbourOptions
from noria_bench.targets.catalog import TARGETS, Protocol, Target
from noria_bench.targets.server import interpreter_of, isolated_config, running_target

_log_status = status_log("neighbours")
NUM_SMALL = 7
FILE_NAME = "heaps.json"
_JOB_POLL_S = 0.5  # as Replicate's client does
_NUM_JOBS = 32  # jobs of the heap that are under way


@dataclass(frozen=True)
class Load:
    """A closed loop of one client: so many connections send `body` to `path`, or keep so many jobs under way."""

    path: str
    body: Mapping[str, Any]
    connections: int = 1
    steps: int = 0  # model calls of a request, summed over its images; 0 of texts

    @property
    def is_of_jobs(self) -> bool:
        """Whether requests are answered before they are done."""
        return self.path == "/v1/jobs"

    def split(self) -> "Load":
        """Return the same work in requests of one image, for servers that take no other."""
        n = self.body.get("n", 1)
        return replace(
            self,
            body={name: value for name, value in self.body.items() if name != "n"},
            connections=self.connections * n,
            steps=self.steps // n,
        )


def _images(num_steps: int, n: int = 1, path: str = "/t2i", connections: int = 1) -> Load:
    body = {"prompt": "a red circle", "inference_steps": num_steps, "n": n}
    return Load(path, body if path == "/t2i" else {"input": body}, connections, num_steps * n)


@dataclass(frozen=True)
class Heap:
    """The requests that one client keeps in flight, and the small ones of the others."""

    heap: Load
    small: Load
    every_target: bool = False  # whether targets other than Noria can serve it


HEAPS: Mapping[str, Heap] = MappingProxyType(
    {
        "long": Heap(_images(200, 16), _images(20), every_target=True),
        "short": Heap(_images(8, connections=200), _images(20), every_target=True),
        "jobs": Heap(_images(50, path="/v1/jobs", connections=_NUM_JOBS), _images(20)),
        "texts": Heap(
            Load("/v1/embeddings", {"input": ["a red circle on a blue square"] * 2048}, connections=4),
            Load("/v1/embeddings", {"input": "a red circle"}),
        ),
    }
)


class HeapResult(Struct, frozen=True):
    """Seconds of requests, by who was there."""

    target: str
    heap: str
    alone_s: float  # mean of a small request on an idle server
    heap_alone_s: float  # mean of a request of the heap
    small_p99_s: float  # all small clients, without the heap
    beside_p99_s: float  # and beside it
    lone_beside_s: float  # mean of the requests of one small client beside the heap
    slowdowns: dict[str, float]  # each client's, all small ones beside the heap; infinity: nothing was done
    steps_per_s: float  # made for all clients then
    num_failed: int

    @property
    def growth(self) -> float:
        """The p99 of small requests beside the heap over that without it."""
        return self.beside_p99_s / self.small_p99_s

    @property
    def small_slowdowns(self) -> list[float]:
        """The slowdowns of the small clients."""
        return [value for name, value in self.slowdowns.items() if name != "heap"]


def main(config: Config, options: NeighbourOptions, folder: pathlib.Path) -> int:
    """Measure, write heaps.json into `folder`, print a table; returns the exit status.

    Raises:
        NoriaError: the model is not one of images, the folder cannot be created, or a target is not installed.

    """
    make_results_folder(folder)
    for name in options.targets:
        interpreter_of(_target_of(name, config)[0].framework)  # now, and not after the targets before it
    results: list[HeapResult] = []
    failures: list[str] = []
    provenance = collect_provenance()
    with tempfile.TemporaryDirectory(prefix="noria-heaps-") as work:
        config, spec, _ = open_both_models(isolated_config(config, work))

        def measure() -> None:
            for name in options.targets:
                target, of_target = _target_of(name, config)
                for heap in options.heaps:
                    if target.module is not None and not HEAPS[heap].every_target:
                        _log_status(f"{name} serves no {heap}: left out")
                        continue
                    _log_status(f"{name}, {heap}")
                    with _serving(target, spec, of_target, pathlib.Path(work)) as clients:
                        results.append(measure_heap(name, heap, clients, options.seconds))
                    document = {"bench": "heaps", "options": msgspec.to_builtins(options), "results": results}
                    write_json(provenance | document, folder / FILE_NAME)

        status = run_to_end(measure, _log_status, failures)
    if results:
        print(table(results, result_line(provenance)).markdown())
    return status


def _target_of(name: str, config: Config) -> tuple[Target, Config]:
    if name != ARRIVAL:
        return TARGETS[name], config
    engine = msgspec.structs.replace(config.engine, policy="fcfs")
    return TARGETS["noria"], msgspec.structs.replace(config, engine=engine)


@dataclass(frozen=True)
class Clients:
    """The clients of a server: the small ones first, the heap last."""

    port: int
    protocol: Protocol
    path: str  # path of images
    headers: Sequence[Mapping[str, str]]
    splits: bool  # whether a request has one image

    def run(self, loads: Mapping[int, Load], seconds: float) -> dict[int, list[Reply]]:
        """Run the loads of clients by their number for `seconds`; return the replies of each.

        Beside the heap the small clients go on until its last request is done: the end of a heap without others would
        make its slowdown too small.
        """
        heap_ended, small_ended = threading.Event(), threading.Event()

        def run_one(client: int, load: Load) -> list[Reply]:
            ended = heap_ended if client == NUM_SMALL else small_ended
            limit_s = seconds if client == NUM_SMALL or NUM_SMALL not in loads else math.inf
            load = load.split() if self.splits else load
            run = self._run_jobs if load.is_of_jobs else self._run_requests
            return run(client, load, limit_s, ended)

        with ThreadPoolExecutor(len(loads)) as executor:
            try:
                running = {client: executor.submit(run_one, client, load) for client, load in loads.items()}
                if NUM_SMALL in running:
                    running[NUM_SMALL].result()
                    small_ended.set()
                return {client: each.result() for client, each in running.items()}
            finally:
                heap_ended.set()
                small_ended.set()

    def _run_requests(self, client: int, load: Load, seconds: float, ended: threading.Event) -> list[Reply]:
        path = self.path if load.path == "/t2i" else load.path

        def body(number: int) -> bytes:
            if load.path != "/t2i":
                return msgspec.json.encode(load.body)
            return encode_request(self.protocol, {**load.body, "seed": number})

        return run_closed_loop(
            self.port, load.connections, seconds, body, path, ended=ended, headers=self.headers[client]
        )

    def _run_jobs(self, client: int, load: Load, seconds: float, ended: threading.Event) -> list[Reply]:
        """Keep jobs under way for `seconds` and until one is done; then cancel the others, which count for nothing."""
        replies: list[Reply] = []
        stop = time.monotonic() + seconds
        url, headers = f"http://127.0.0.1:{self.port}", {**HEADERS, **self.headers[client]}

        def keep_one() -> None:
            client_of_jobs = httpx.Client(base_url=url, headers=headers, timeout=60, trust_env=False)

            def call(method: str, path: str, body: object = None) -> tuple[int, Any]:
                answer = client_of_jobs.request(method, path, json=body)
                return answer.status_code, answer.json()

            def may_go_on() -> bool:
                return (time.monotonic() < stop or not replies) and not ended.is_set()

            with client_of_jobs:
                while may_go_on():
                    sent = time.monotonic()
                    status, job = call("POST", load.path, dict(load.body))
                    while status < 300 and job["status"] in ("starting", "processing"):
                        ended.wait(_JOB_POLL_S)
                        status, job = call("GET" if may_go_on() else "DELETE", f"{load.path}/{job['id']}")
                    if status < 300 and job["status"] == "canceled":
                        break
                    if status >= 300:
                        ended.wait(_JOB_POLL_S)
                    is_done = status < 300 and job["status"] == "succeeded"
                    replies.append(Reply(sent, time.monotonic(), 200 if is_done else status or 500, 0))

        with ThreadPoolExecutor(load.connections) as executor:
            for each in [executor.submit(keep_one) for _ in range(load.connections)]:
                each.result()
        return replies


@contextlib.contextmanager
def _serving(target: Target, spec: Any, config: Config, work: pathlib.Path) -> Iterator[Clients]:
    """Start a fresh server of `target`; with a key for each client if it is Noria."""
    headers: list[Mapping[str, str]] = [{} for _ in range(NUM_SMALL + 1)]
    if target.module is None:
        keys = [generate_key(f"small-{number}") for number in range(NUM_SMALL)] + [generate_key("heap")]
        file = work / "keys.toml"
        file.write_text("\n".join(entry for _, entry in keys))
        headers = [{"authorization": f"Bearer {key}"} for key, _ in keys]
        frontend = msgspec.structs.replace(config.frontend, api_keys_file=str(file))
        config = msgspec.structs.replace(config, frontend=frontend)
    server: RunningServer
    with running_target(target, spec, config) as server:
        yield Clients(server.port, target.protocol, target.path, headers, splits=target.module is not None)


def measure_heap(target: str, name: str, clients: Clients, seconds: float) -> HeapResult:
    """Measure one heap at a running server."""
    heap, small = HEAPS[name].heap, HEAPS[name].small
    all_small = dict.fromkeys(range(NUM_SMALL), small)
    clients.run({0: small}, 1.0)
    alone = clients.run({0: small}, seconds / 3)
    without = clients.run(all_small, seconds)
    heap_alone = clients.run({NUM_SMALL: heap}, seconds)
    began = time.monotonic()
    beside = clients.run({**all_small, NUM_SMALL: heap}, 3 * seconds)
    beside_s = time.monotonic() - began
    lone = clients.run({0: small, NUM_SMALL: heap}, seconds)
    alone_s, heap_alone_s = _mean_s(alone[0]), _mean_s(heap_alone[NUM_SMALL])
    slowdowns = {f"small {number}": _mean_s(beside[number]) / alone_s for number in range(NUM_SMALL)}
    slowdowns["heap"] = _mean_s(beside[NUM_SMALL]) / heap_alone_s
    window = began, began + beside_s
    per_reply = {**dict.fromkeys(range(NUM_SMALL), small.steps), NUM_SMALL: heap.steps / _parts(clients, heap)}
    return HeapResult(
        target,
        name,
        alone_s,
        heap_alone_s,
        _p99_s([reply for replies in without.values() for reply in replies]),
        _p99_s([reply for number in range(NUM_SMALL) for reply in beside[number]]),
        _mean_s(lone[0]),
        slowdowns,
        sum(per_reply[client] * _share_in(reply, *window) for client, each in beside.items() for reply in each)
        / beside_s,
        sum(
            reply.status != 200
            for run in (alone, without, heap_alone, beside, lone)
            for replies in run.values()
            for reply in replies
        ),
    )


def _parts(clients: Clients, load: Load) -> int:
    """Return into how many requests of one image a request is split."""
    return int(load.body.get("n", 1)) if clients.splits else 1


def _share_in(reply: Reply, start_s: float, end_s: float) -> float:
    """Return which part of a request's time was in a window; 0 of one that failed."""
    inside_s = min(reply.done_s, end_s) - max(reply.sent_s, start_s)
    return max(inside_s, 0.0) / reply.latency_s if reply.status == 200 else 0.0


def _mean_s(replies: Sequence[Reply]) -> float:
    served = [reply.latency_s for reply in replies if reply.status == 200]
    return statistics.mean(served) if served else math.inf


def _p99_s(replies: Sequence[Reply]) -> float:
    served = [reply.latency_s for reply in replies if reply.status == 200]
    return percentile(served, 0.99) if served else math.inf


def table(results: Sequence[HeapResult], note: str = "") -> Table:
    """Return a row for each target and heap."""
    arrival = {each.heap: each.steps_per_s for each in results if each.target == ARRIVAL}

    def over_arrival(each: HeapResult) -> float:
        return each.steps_per_s / arrival[each.heap] if arrival.get(each.heap) else math.nan

    return Table.of(
        "Small requests beside one client's heap",
        results,
        ("heap, target", lambda each: f"{each.heap}, {each.target}"),
        ("p99, s", lambda each: format_number(each.small_p99_s, 2)),
        ("beside, s", lambda each: format_number(each.beside_p99_s, 2)),
        ("growth", lambda each: format_number(each.growth, 2)),
        ("one beside ÷ alone", lambda each: format_number(each.lone_beside_s / each.alone_s, 2)),
        ("slowdown, small", lambda each: format_number(max(each.small_slowdowns), 2)),
        ("slowdown, heap", lambda each: format_number(each.slowdowns["heap"], 2)),
        ("steps/s", lambda each: format_number(each.steps_per_s, 1)),
        ("÷ arrival", lambda each: format_number(over_arrival(each), 2)),
        ("failed", lambda each: str(each.num_failed)),
        notes=(note,) if note else (),
    )
