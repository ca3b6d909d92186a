"""What can be benched, by name: Noria, the seed article's five endpoints, the peers. Light: the command line reads it."""

from dataclasses import dataclass
from typing import Literal

import msgspec


class TargetSettings(msgspec.Struct, frozen=True):
    """What may be turned at a server that microbatches or streams; each reads what it has."""

    timeout_s: float = 0.5  # a batch that is not full goes after this long
    max_images: int = 8  # of a batch
    stream: Literal["bytesio", "chunks"] = (
        "bytesio"  # how the streaming endpoints give the body, as in tutorials or in pieces of 64 kB
    )


@dataclass(frozen=True)
class Target:
    """A server, and the route of it that draws."""

    name: str
    path: str
    module: str | None = None  # that serves it, run as `python -m MODULE JOB`; None: `noria serve`
    peer: str | None = None  # whose virtual environment it runs in; None: Noria's own
    reports_queue_time: bool = True  # False: what it tells of a request's wait is not all of it, since it cannot know
    settings: TargetSettings = TargetSettings()  # unless a bench turns them: the best that were found, or the seed's


TARGETS = {
    target.name: target
    for target in (
        Target("noria", "/t2i"),
        Target(
            "seed-stream-async",
            "/t2i/stream-async",
            "noria_bench.targets.reference.reference_server",
            reports_queue_time=False,
        ),
        Target(
            "seed-response-async",
            "/t2i/response-async",
            "noria_bench.targets.reference.reference_server",
            reports_queue_time=False,
        ),
        Target("seed-stream-sync", "/t2i/stream-sync", "noria_bench.targets.reference.reference_server"),
        Target("seed-response-sync", "/t2i/response-sync", "noria_bench.targets.reference.reference_server"),
        Target("seed-batched", "/t2i/batched", "noria_bench.targets.reference.reference_server"),
        # `noria bench sweep peers` (benchmarks/peers-2026-11-21): between 5 and 200 ms nothing differs by more than runs do; 50 ms
        # brought the users together again (a mean batch of 6.8 instead of 5.3) with the shortest p99.
        Target(
            "litserve",
            "/t2i",
            "noria_bench.targets.frameworks.litserve_app",
            "litserve",
            settings=TargetSettings(timeout_s=0.05),
        ),
        # Its `timeout_s` is when BentoML refuses, not how long it waits, which it learns: so, never.
        Target(
            "bentoml",
            "/t2i",
            "noria_bench.targets.frameworks.bentoml_app",
            "bentoml",
            settings=TargetSettings(timeout_s=3600.0),
        ),
        # It makes a batch of whoever comes in this time while the one before is drawn, so that a short wait makes batches of one: 500 ms
        # had 1.9 times the requests a second of 50 ms, and the shortest p99; 1 and 2 s gained nothing.
        Target("ray", "/t2i", "noria_bench.targets.frameworks.ray_app", "ray", settings=TargetSettings(timeout_s=0.5)),
    )
}

PEERS = tuple(target.peer for target in TARGETS.values() if target.peer is not None)


def read_targets(text: str) -> tuple[Target, ...]:
    """`noria,ray` or `all` as targets, in the order of the tables; raises ValueError naming all of them."""
    names = list(TARGETS) if text == "all" else text.split(",")
    if unknown := [name for name in names if name not in TARGETS]:
        raise ValueError(f"{unknown[0]!r}; targets are all, {', '.join(TARGETS)}")
    return tuple(target for name, target in TARGETS.items() if name in names)
