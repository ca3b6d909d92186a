"""The measurements of `noria bench deploys`, as its JSON file has them; and how replies become figures. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from noria_bench.load.closed_loop import Reply
from noria_bench.measurement.run_metrics import percentile

FILE_NAME = "deploys.json"
OK = 200

Kind = Literal["images", "texts"]
KINDS: tuple[Kind, ...] = ("images", "texts")


class Span(Struct, frozen=True):
    """A phase of a run. Times are monotonic seconds."""

    name: str
    start_s: float
    end_s: float


class Latencies(Struct, frozen=True):
    """Of the requests of one kind that were sent in one phase. Failed ones have none."""

    num_ok: int
    num_failed: int
    p50_ms: float | None
    p99_ms: float | None


class Phase(Struct, frozen=True):
    """The latencies and failures that users noticed in one phase."""

    name: str
    seconds: float
    by_kind: dict[str, Latencies]


class DeploysRun(Struct, frozen=True):
    """The result of one server, on which a version of each model is deployed."""

    niceness: int
    round: int
    phases: list[Phase]


class DeploysResult(Struct, frozen=True):
    """The whole document."""

    provenance: dict[str, Any]
    models: dict[str, str]  # by kind
    options: dict[str, Any]
    runs: list[DeploysRun] = []
    failures: list[str] = []
    complete: bool = False


def phases_of(spans: Iterable[Span], replies: Mapping[Kind, Sequence[Reply]]) -> list[Phase]:
    """Return what the requests did that were sent in each span."""
    return [
        Phase(
            span.name,
            span.end_s - span.start_s,
            {
                kind: _latencies([each for each in of_kind if span.start_s <= each.sent_s < span.end_s])
                for kind, of_kind in replies.items()
            },
        )
        for span in spans
    ]


def _latencies(replies: Sequence[Reply]) -> Latencies:
    ok_ms = [1000 * reply.latency_s for reply in replies if reply.status == OK]
    p50_ms, p99_ms = (percentile(ok_ms, share) if ok_ms else None for share in (0.5, 0.99))
    return Latencies(len(ok_ms), len(replies) - len(ok_ms), p50_ms, p99_ms)


def num_failed(runs: Iterable[DeploysRun]) -> int:
    """The number of requests that failed in any phase."""
    return sum(each.num_failed for run in runs for phase in run.phases for each in phase.by_kind.values())
