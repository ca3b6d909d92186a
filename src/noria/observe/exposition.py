"""What `/metrics` answers: every process's values, summed, and what is read at the scrape.

Prometheus asks for OpenMetrics, which alone has exemplars; whoever does not gets the text format.
"""

import functools
import os
import time
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from noria.observe.exemplars import Exemplars
from noria.observe.gpus import Gpus, open_nvml
from noria.observe.machine import Processes
from noria.observe.metrics import DECLARATIONS, REGISTRY

_exemplars = Exemplars()


def observe(histogram: Histogram, seconds: float, labels: Mapping[str, str], who: Mapping[str, str]) -> None:
    """Count `seconds` and keep `who`, such as {"request_id": …}, as the example of its bucket."""
    name: str = histogram._name
    histogram.labels(**labels).observe(seconds)
    _exemplars.note(name, labels, DECLARATIONS[name].buckets, seconds, who, time.time())


def exposition(accept: str = "") -> tuple[bytes, str]:
    """All values, and their content type, in the format that the header `accept` asks for."""
    if "application/openmetrics-text" in accept:
        return generate_openmetrics(_Everything()), CONTENT_TYPE_LATEST  # type: ignore[no-untyped-call]
    return generate_latest(_Everything()), CONTENT_TYPE_PLAIN_0_0_4


@functools.cache
def _gpus() -> Gpus:
    return Gpus(open_nvml())


class _Everything:
    """What prometheus_client's writers take for a registry."""

    def collect(self) -> Iterator[Metric]:
        yield from _exemplars.pinned(_counted())
        yield from Processes().collect()
        yield from _gpus().collect()


def _counted() -> Iterator[Metric]:
    """The values of every process; of this one where PROMETHEUS_MULTIPROC_DIR is not set."""
    if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:
        yield from REGISTRY.collect()
        return
    yield from MultiProcessCollector(CollectorRegistry()).collect()  # type: ignore[no-untyped-call]
