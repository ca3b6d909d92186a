"""A declared metric, and how `declarations.py` declares one: in a section of docs/metrics.md."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from noria.observe.metrics.mmap_writer import write_allocated_files

MetricKind = Literal["counter", "gauge", "histogram"]

_add_to_values = write_allocated_files()
REGISTRY = CollectorRegistry()

# From a 1-step turbo image with a cached prompt on a GPU to the default request_timeout_s.
DURATION_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 600.0)


def add_all(*amounts: tuple[Any, float]) -> None:
    """Add amounts to series of counters and gauges, and observe them in series of histograms.

    Together, and without prometheus_client's checks, in a fifth of the time.
    """
    changes: list[tuple[Any, float]] = []
    for metric, amount in amounts:
        if type(metric) is _Histogram:
            changes += (metric._sum, amount), (metric._buckets[bisect_left(metric._upper_bounds, amount)], 1)
        else:
            changes.append((metric._value, amount))
    _add_to_values(changes)


class _Counter(Counter):
    """A counter that is added to as by `add_all`."""

    def inc(self, amount: float = 1, _exemplar: dict[str, str] | None = None) -> None:
        add_all((self, amount))


class _Gauge(Gauge):
    """A gauge that is added to as by `add_all`."""

    def inc(self, amount: float = 1) -> None:
        add_all((self, amount))

    def dec(self, amount: float = 1) -> None:
        add_all((self, -amount))


class _Histogram(Histogram):
    """A histogram that is observed in as by `add_all`."""

    def observe(self, amount: float, _exemplar: dict[str, str] | None = None) -> None:
        add_all((self, amount))


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
        counter = _Counter(name, text, labels, registry=REGISTRY)
        for value in values:
            counter.labels(value)
        return counter

    def gauge(self, name: str, text: str, *labels: str, mode: Literal["livesum", "livemax"] = "livesum") -> Gauge:
        """`mode`: how the values of several processes are combined."""
        self.declare(name, "gauge", text, labels)
        return _Gauge(name, text, labels, multiprocess_mode=mode, registry=REGISTRY)

    def histogram(self, name: str, text: str, *labels: str, buckets: Sequence[float] = DURATION_BUCKETS_S) -> Histogram:
        """Without `buckets` it is one of durations."""
        self.declare(name, "histogram", text, labels, buckets)
        return _Histogram(name, text, labels, buckets=buckets, registry=REGISTRY)
