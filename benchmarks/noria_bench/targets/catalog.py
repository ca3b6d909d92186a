"""The benchmark targets by name: Noria, the reference server's five endpoints, the frameworks.

Imports little: the command line reads it.
"""

from dataclasses import dataclass
from typing import Literal

import msgspec

Protocol = Literal["t2i", "open-inference"]
"""How a request is sent: as Noria's `/t2i` reads it, or packed into the Open Inference Protocol (`load.protocols`)."""

_REFERENCE_SERVER = "noria_bench.targets.reference.reference_server"


class TargetSettings(msgspec.Struct, frozen=True):
    """Settings of servers that batch or stream; each server reads those that apply to it."""

    # A batch that is not full starts after this time.
    timeout_s: float = 0.5
    # Maximum size of a batch.
    max_images: int = 8
    # How the streaming endpoints send the body: by line, as in tutorials, or in chunks of 64 kB.
    stream: Literal["bytesio", "chunks"] = "bytesio"


@dataclass(frozen=True)
class Target:
    """A server, and its route that generates images."""

    name: str
    path: str
    module: str | None = None  # run as `python -m MODULE JOB`; None: `noria serve`
    framework: str | None = None  # whose virtual environment it runs in; None: Noria's own
    reports_queue_time: bool = True  # False: the reported time is incomplete, so it is not used
    # unless a bench varies them: the article's, or the best that were found
    settings: TargetSettings = TargetSettings()
    protocol: Protocol = "t2i"


TARGETS = {
    target.name: target
    for target in (
        Target("noria", "/t2i"),
        Target("reference-stream-async", "/t2i/stream-async", _REFERENCE_SERVER, reports_queue_time=False),
        Target("reference-response-async", "/t2i/response-async", _REFERENCE_SERVER, reports_queue_time=False),
        Target("reference-stream-sync", "/t2i/stream-sync", _REFERENCE_SERVER),
        Target("reference-response-sync", "/t2i/response-sync", _REFERENCE_SERVER),
        Target("reference-batched", "/t2i/batched", _REFERENCE_SERVER),
        # `noria bench sweep frameworks` (results/frameworks-2026-11-21): from 5 to 200 ms the differences are within
        # the noise of runs; 50 ms had larger batches (a mean of 6.8 instead of 5.3) and the shortest p99.
        Target(
            "litserve",
            "/t2i",
            "noria_bench.targets.frameworks.litserve_app",
            "litserve",
            settings=TargetSettings(timeout_s=0.05),
        ),
        # BentoML rejects requests after `timeout_s`, which must not happen here. How long it waits for a batch, it
        # learns.
        Target(
            "bentoml",
            "/t2i",
            "noria_bench.targets.frameworks.bentoml_app",
            "bentoml",
            settings=TargetSettings(timeout_s=3600.0),
        ),
        # Ray forms a batch while the previous one runs, from what arrives within this time; a short wait makes batches
        # small: 500 ms had 1.9 times the requests per second of 50 ms, and the shortest p99; 1 and 2 s gained nothing.
        Target("ray", "/t2i", "noria_bench.targets.frameworks.ray_app", "ray", settings=TargetSettings(timeout_s=0.5)),
        # Dynamic batching with three delays; the best one counts.
        *(
            Target(
                f"triton-{delay_ms}ms",
                "/v2/models/t2i/infer",
                "noria_bench.targets.frameworks.triton_app",
                "triton",
                settings=TargetSettings(timeout_s=delay_ms / 1000),
                protocol="open-inference",
            )
            for delay_ms in (0, 50, 500)
        ),
    )
}

FRAMEWORKS = tuple(dict.fromkeys(target.framework for target in TARGETS.values() if target.framework is not None))
# What `noria bench install` installs; Infinity serves text encoders only.
INSTALLABLE = (*FRAMEWORKS, "infinity")


def read_targets(text: str) -> tuple[Target, ...]:
    """Parse `noria,ray` or `all`, in the order of the tables.

    Raises ValueError, listing all names, for an unknown one.
    """
    names = list(TARGETS) if text == "all" else text.split(",")
    if unknown := [name for name in names if name not in TARGETS]:
        raise ValueError(f"{unknown[0]!r}; targets are all, {', '.join(TARGETS)}")
    return tuple(target for name, target in TARGETS.items() if name in names)
