"""The measurements of `noria bench cluster`, as its JSON file has them; and how replies become figures. Pure."""

from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Any, Literal

from msgspec import Struct

from noria_bench.load.closed_loop import Reply
from noria_bench.measurement.run_metrics import percentile

FILE_NAME = "cluster.json"

Serving = Literal["plain", "ray"]
SERVINGS: tuple[Serving, ...] = ("plain", "ray")

Steps = Literal["short", "long"]


class ClusterRun(Struct, frozen=True):
    """The result of one load on one server."""

    serving: Serving
    num_engines: int
    steps: Steps
    round: int
    seconds: float
    num_images: float  # an image counts with the part of its time that lies in these seconds
    p50_ms: float  # from request to answer, of the requests that ended in these seconds
    p99_ms: float
    num_failed: int
    cpu_s: dict[str, float]  # by role of `servings.py`, and of `bench` and `others`

    @property
    def images_per_s(self) -> float:
        """Images per second."""
        return self.num_images / self.seconds


class ClusterResult(Struct, frozen=True):
    """The whole document."""

    provenance: dict[str, Any]
    versions: dict[str, str]  # versions of the packages in Ray's environment, in which both servers run
    options: dict[str, Any]
    ideal: dict[str, float]  # images per second of an engine whose slots are never empty, by steps
    runs: list[ClusterRun] = []
    failures: list[str] = []
    complete: bool = False


def summarize(
    serving: Serving,
    num_engines: int,
    steps: Steps,
    number: int,
    replies: Sequence[Reply],
    window_s: tuple[float, float],
    cpu_s: dict[str, float],
) -> ClusterRun:
    """The run that these replies are, of users who always had a request under way in the window.

    Raises:
        RuntimeError: no image ended in the window.

    """
    began_s, ended_s = window_s
    images = [reply for reply in replies if reply.status == HTTPStatus.OK]
    latencies_ms = sorted(1000 * reply.latency_s for reply in images if began_s <= reply.done_s < ended_s)
    if not latencies_ms:
        raise RuntimeError(f"{serving}, {num_engines} engines: no image ended in {ended_s - began_s:.1f} s")
    inside_s = [min(reply.done_s, ended_s) - max(reply.sent_s, began_s) for reply in images]
    return ClusterRun(
        serving=serving,
        num_engines=num_engines,
        steps=steps,
        round=number,
        seconds=ended_s - began_s,
        num_images=sum(max(0.0, part_s) / reply.latency_s for part_s, reply in zip(inside_s, images, strict=True)),
        p50_ms=percentile(latencies_ms, 0.5),
        p99_ms=percentile(latencies_ms, 0.99),
        num_failed=len(replies) - len(images),
        cpu_s=cpu_s,
    )


def num_failed(runs: Iterable[ClusterRun]) -> int:
    """The number of requests without an image."""
    return sum(run.num_failed for run in runs)
