"""Options of `noria bench neighbours --part heaps`. Imports little: the command line reads it."""

from dataclasses import dataclass

from noria_bench.targets.catalog import TARGETS

HEAP_NAMES = ("long", "short", "jobs", "texts")
ARRIVAL = "noria-fcfs"
"""Noria with the order of arrival, whose steps a second those of other targets are compared with."""
HEAP_TARGETS = ("noria", ARRIVAL, *(name for name in TARGETS if name != "noria"))


@dataclass(frozen=True)
class HeapOptions:
    """`seconds` of each measurement; that of all clients beside the heap takes three times as long."""

    heaps: tuple[str, ...] = HEAP_NAMES
    targets: tuple[str, ...] = ("noria", ARRIVAL, "reference-batched", "litserve", "triton-50ms")
    seconds: float = 30.0
