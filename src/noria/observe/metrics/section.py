"""What a declared metric is, and how `declarations.py` declares one: in a section of docs/metrics.md."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from noria.observe.metrics.mmap_writer import write_allocated_files

MetricKind = Literal["counter", "gauge", "histogram"]

write_allocated_files()
REGISTRY = CollectorRegistry()

# From a 1-step turbo image with a cached prompt on a GPU to the default request_timeout_s.
DURATION_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 600.0)


@dataclass(frozen=True)
class Declaration:
    """A metric as Prometheus sees it."""

    name: str  # with `_total` if it is a counter
    kind: MetricKind
    help: str
    labels: tuple[str, ...]
    buckets: tuple[float, ...]  # empty if it is no histogram
    section: str  # heading in docs/metrics.md

    @property
    def unit(self) -> str:
        """The unit of a value, by the metric's name; empty if it has none."""
        stem = self.name.removesuffix("_total")
        return next((unit for unit in ("seconds", "bytes", "ratio") if stem.endswith(unit)), "")

    @property
    def series(self) -> tuple[str, ...]:
        """The names of its series, which a query may use."""
        return (
            tuple(self.name + suffix for suffix in ("_bucket", "_sum", "_count"))
            if self.kind == "histogram"
            else (self.name,)
        )


DECLARATIONS: dict[str, Declaration] = {}
"""All metrics by name, in the order of docs/metrics.md."""


class Section:
    """A heading of docs/metrics.md, and the metrics below it."""

    def __init__(self, heading: str) -> None:
        self._heading = heading

    def declare(
        self, name: str, kind: MetricKind, text: str, labels: Sequence[str] = (), buckets: Sequence[float] = ()
    ) -> Declaration:
        """Declare a metric. One whose values are read at the scrape (`exposition.py`) needs nothing else."""
        assert name not in DECLARATIONS, name
        declaration = DECLARATIONS[name] = Declaration(name, kind, text, tuple(labels), tuple(buckets), self._heading)
        return declaration

    def counter(self, name: str, text: str, *labels: str, values: Sequence[str] = ()) -> Counter:
        """`values` of its only label start at 0: Prometheus sees no increase in a series that starts at 1."""
        self.declare(f"{name}_total", "counter", text, labels)
        counter = Counter(name, text, labels, registry=REGISTRY)
        for value in values:
            counter.labels(value)
        return counter

    def gauge(self, name: str, text: str, *labels: str, mode: Literal["livesum", "livemax"] = "livesum") -> Gauge:
        """`mode`: how the values of several processes are combined."""
        self.declare(name, "gauge", text, labels)
        return Gauge(name, text, labels, multiprocess_mode=mode, registry=REGISTRY)

    def histogram(self, name: str, text: str, *labels: str, buckets: Sequence[float] = DURATION_BUCKETS_S) -> Histogram:
        """Without `buckets` it is one of durations."""
        self.declare(name, "histogram", text, labels, buckets)
        return Histogram(name, text, labels, buckets=buckets, registry=REGISTRY)
