"""Several clients in closed loops: how long each one's requests take beside the others, and alone.

A client sends its next request when one has ended, after a pause. Its *slowdown* is the mean time of its requests over
that of the same client with the devices to itself.
"""

import itertools
import pathlib
import random
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from noria_bench.reports.table import MISSING, Table, format_number, format_share
from noria_bench.simulator.devices import Device
from noria_bench.simulator.study import Scenario
from noria_bench.simulator.workload import Arrival, Shape, SimulateError, read_json
from noria_bench.simulator.world import Settings, simulate

_WARM_UP = 0.05  # share of the time whose requests do not count
_FIRST_WITHIN_S = 0.2  # clients begin at random times within it
_RETRY_S = 1.0  # after a request that was not served
_MAX_CLIENTS = 1000


class ClientGroup(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Clients that send the same requests."""

    name: str
    clients: int = 1
    open: int = 1  # requests that a client has in flight
    images: int = 1
    steps: int = 20
    rows: int = 2  # rows of an image in a call: 2 with guidance
    think_s: float = 0.0  # mean of the pause before a client's next request, which is exponential
    weight: float = 1.0  # weight of a client's share
    priority: str = "normal"

    @property
    def text(self) -> str:
        """The clients and their requests, in words."""
        clients = "one client" if self.clients == 1 else f"{self.clients} clients"
        requests = "a request" if self.open == 1 else f"{self.open} requests"
        images = "an image" if self.images == 1 else f"{self.images} images"
        weight = "" if self.weight == 1.0 else f", weight {self.weight:g}"
        return f"{self.name}: {clients} with {requests} of {images}, {self.steps} steps, at any time{weight}"

    def problem(self) -> str:
        """Return what is wrong with it, or an empty string."""
        for name, high in (("clients", _MAX_CLIENTS), ("open", 10_000)):
            if not 1 <= getattr(self, name) <= high:
                return f"{name} is {getattr(self, name)}; it must be from 1 to {high}"
        if not self.name:
            return "name is empty; it is what the table calls the clients"
        if not 0.0 <= self.think_s <= 86_400.0:
            return f"think_s is {self.think_s:g}; it must be from 0 to 86400"
        if not 0.001 <= self.weight <= 1000.0:
            return f"weight is {self.weight:g}; it must be from 0.001 to 1000"
        return Shape(images=self.images, steps=self.steps, rows=self.rows, priority=self.priority).problem()


EXAMPLE_GROUPS = (
    ClientGroup("large", images=16, steps=200),
    ClientGroup("interactive", clients=7),
    ClientGroup("jobs", open=16, weight=0.25),
)
"""Clients: one that always has 16 images of 200 steps in flight, seven that wait for one of 20 steps, and jobs."""


def read_groups(file: pathlib.Path) -> tuple[ClientGroup, ...]:
    """Read the clients of a file. Raises SimulateError."""
    example = '; clients are a list such as [{"name": "large", "images": 16, "steps": 200}]'
    groups = read_json(file, tuple[ClientGroup, ...], "", example)
    for group in groups:
        if problem := group.problem():
            raise SimulateError(f"{file}: {group.name or 'a client'}: {problem}")
    if not groups or len({group.name for group in groups}) < len(groups):
        raise SimulateError(f"{file}: there must be at least one client, and no name twice")
    return groups


@dataclass(slots=True)
class _Measured:
    latencies_s: list[float] = field(default_factory=list)
    num_unserved: int = 0


class ClosedLoops:
    """The clients of a simulation, and what they measure: a `world.RequestSource`."""

    def __init__(self, groups: Sequence[ClientGroup], device: Device, duration_s: float, seed: int) -> None:
        self._size, self._duration_s, self._rng = device.sizes[0], duration_s, random.Random(seed)
        self._groups = {f"{group.name} {k}": group for group in groups for k in range(group.clients)}
        self.measured = {client: _Measured() for client in self._groups}
        self.steps = Counter[str]()  # images that stepped, until the end of the time

    def arrivals(self) -> Iterator[Arrival]:
        """Yield the first requests of each client, in order."""
        clients = [client for client, group in self._groups.items() for _ in range(group.open)]
        times_s = sorted(_FIRST_WITHIN_S * self._rng.random() for _ in clients)
        self._rng.shuffle(clients)
        return (self._request(client, at_s) for client, at_s in zip(clients, times_s, strict=True))

    def on_steps(self, requests: Sequence[Arrival], at_s: float) -> None:
        """Count the images of a call."""
        if at_s <= self._duration_s:
            self.steps.update([request.client for request in requests])

    def on_end(self, request: Arrival, latency_s: float | None, at_s: float) -> Arrival | None:
        """Count a request, which had its images after `latency_s`, or never; return the client's next one."""
        if at_s > self._duration_s:
            return None
        measured = self.measured[request.client]
        if request.at_s >= _WARM_UP * self._duration_s:
            if latency_s is None:
                measured.num_unserved += 1
            else:
                measured.latencies_s.append(latency_s)
        think_s = self._groups[request.client].think_s
        pause_s = think_s * self._rng.expovariate(1.0) if think_s else 0.0
        return self._request(request.client, at_s + pause_s + (_RETRY_S if latency_s is None else 0.0))

    def _request(self, client: str, at_s: float) -> Arrival:
        group, (width_px, height_px) = self._groups[client], self._size
        return Arrival(
            at_s, "", width_px, height_px, group.steps, group.images, group.rows, group.priority, None, client,
            group.weight,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class GroupResult:
    """The measurements of a group's clients in a scenario."""

    scenario: str
    group: ClientGroup
    latencies_s: Sequence[float]
    num_unserved: int
    slowdown: float | None  # that of its slowest client; None: one of them has had no images
    steps_per_s: float

    def as_dict(self) -> dict[str, Any]:
        """Return the figures, JSON-ready; latencies are None if no request has finished."""
        quantiles = np.quantile(self.latencies_s, (0.5, 0.99)).tolist() if self.latencies_s else (None, None)
        return {
            "scenario": self.scenario,
            "client": self.group.name,
            "clients": self.group.clients,
            "requests": len(self.latencies_s),
            "unserved": self.num_unserved,
            "p50_s": quantiles[0],
            "p99_s": quantiles[1],
            "slowdown": self.slowdown,
            "steps_per_s": self.steps_per_s,
        }


def simulate_clients(
    scenario: Scenario, groups: Sequence[ClientGroup], duration_s: float, seed: int
) -> list[GroupResult]:
    """Return what each group measures beside the others in a scenario."""
    loops = _run(scenario.settings, groups, duration_s, seed)
    results, clients = [], iter(loops.measured)
    for group in groups:
        names = list(itertools.islice(clients, group.clients))
        alone = _run(scenario.settings, [msgspec.structs.replace(group, clients=1)], duration_s, seed)
        (alone_s,) = [_mean_s(each) for each in alone.measured.values()]
        means_s = [_mean_s(loops.measured[name]) for name in names]
        known_s = [mean_s for mean_s in means_s if mean_s is not None]
        results.append(
            GroupResult(
                scenario.name,
                group,
                [latency_s for name in names for latency_s in loops.measured[name].latencies_s],
                sum(loops.measured[name].num_unserved for name in names),
                max(known_s) / alone_s if alone_s is not None and len(known_s) == len(names) else None,
                sum(loops.steps[name] for name in names) / duration_s,
            )
        )
    return results


def _run(settings: Settings, groups: Sequence[ClientGroup], duration_s: float, seed: int) -> ClosedLoops:
    loops = ClosedLoops(groups, settings.device, duration_s, seed)
    simulate(settings, loops.arrivals(), source=loops)
    return loops


def _mean_s(measured: _Measured) -> float | None:
    return statistics.fmean(measured.latencies_s) if measured.latencies_s else None


def rows_of(results: Sequence[GroupResult]) -> list[dict[str, Any]]:
    """Return a row of figures for each group of each scenario."""
    return [result.as_dict() for result in results]


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the rows as a table; the last one of each scenario is of all clients."""
    cells: list[tuple[str, ...]] = []
    for scenario, of_scenario in itertools.groupby(rows, key=lambda row: row["scenario"]):
        found = list(of_scenario)
        total = sum(row["steps_per_s"] for row in found)
        cells += [
            (
                scenario,
                f"{row['client']} × {row['clients']}" if row["clients"] > 1 else row["client"],
                f"{row['requests']:,}",
                *(_cell(row[name]) for name in ("p50_s", "p99_s", "slowdown")),
                format_number(row["steps_per_s"], 1),
                format_share(row["steps_per_s"] / total if total else 0.0),
            )
            for row in found
        ]
        slowdowns = [row["slowdown"] for row in found]
        largest = None if None in slowdowns else max(slowdowns)
        requests = sum(row["requests"] for row in found)
        cells.append((scenario, "all", f"{requests:,}", MISSING, MISSING, _cell(largest), format_number(total, 1), ""))
    notes = [
        "Slowdown: the mean time of the slowest client's requests over that of the same client alone. Steps are model "
        "calls of single images.",
        *(
            f"{row['scenario']}, {row['client']}: {row['unserved']:,} requests were not served."
            for row in rows
            if row["unserved"]
        ),
    ]
    titles = ("scenario", "client", "requests", "p50 (s)", "p99 (s)", "slowdown", "steps/s", "of all")
    return Table("Clients", titles, tuple(cells), tuple(notes))


def _cell(value: float | None) -> str:
    return MISSING if value is None else format_number(value, 2)
