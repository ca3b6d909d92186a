"""The commands `noria bench soak` and `noria bench neighbours`, and their options. Imports little: the command line
reads it.
"""

from dataclasses import dataclass

from noria_bench.command_arguments import BenchCommand
from noria_bench.option_values import ABOVE_0, SECONDS, names, number, one_of
from noria_bench.targets.catalog import TARGETS

HEAP_NAMES = ("long", "short", "jobs", "texts")
ARRIVAL = "noria-fcfs"
"""Noria with the order of arrival, whose steps a second those of other targets are compared with."""
HEAP_TARGETS = ("noria", ARRIVAL, *(name for name in TARGETS if name != "noria"))
_PARTS = ("attacks", "heaps")


@dataclass(frozen=True)
class SoakOptions:
    """How long to soak."""

    minutes: float = 60.0


@dataclass(frozen=True)
class NeighbourOptions:
    """The others are for heaps: `seconds` of each measurement; all clients beside the heap take three times as long."""

    part: str = "attacks"
    heaps: tuple[str, ...] = HEAP_NAMES
    targets: tuple[str, ...] = ("noria", ARRIVAL, "reference-batched", "litserve", "triton-50ms")
    seconds: float = 30.0


_MINUTES = number(ABOVE_0, 10_080, "a soak takes more than 0 and at most 10080 minutes")

SOAK = BenchCommand(
    "soak",
    "what grows in an hour of mixed traffic, attacks and kills",
    "Serve the bundled model under mixed traffic, attacks and kills, and say whether memory, files, threads, "
    "connections and stored data stay flat.",
    SoakOptions(),
    (("--minutes M", "minutes", _MINUTES, "of traffic"),),
)
NEIGHBOURS = BenchCommand(
    "neighbours",
    "how long quiet clients wait while others attack the server, or send it heaps",
    "Run attacks beside a quiet client of the bundled model and an encoder, or heaps of one client beside small "
    "requests of seven others, and say how much longer these wait.",
    NeighbourOptions(),
    (
        ("--part", "part", one_of(_PARTS, "parts"), f"of {', '.join(_PARTS)}"),
        ("--heaps A,B", "heaps", names(HEAP_NAMES, "heaps"), f"of {', '.join(HEAP_NAMES)} (all)"),
        ("--targets A,B", "targets", names(HEAP_TARGETS, "targets"), f"of heaps: {', '.join(HEAP_TARGETS)}"),
        ("--seconds", "seconds", SECONDS, "of each measurement of heaps, three times as long beside them"),
    ),
    usage="[MODEL] [--part attacks|heaps]",
    module="noria_bench.soak.neighbours",
)
