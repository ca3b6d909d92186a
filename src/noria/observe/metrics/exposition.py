"""What `/metrics` answers: every process's values, summed, and what is read at the scrape.

Prometheus asks for OpenMetrics, which alone has exemplars; whoever does not gets the text format.
"""

import functools
import os
import time
from collections.abc import Iterator, Mapping

from prometheus_client import Histogram
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics

from noria.observe.metrics.declarations import DECLARATIONS, REGISTRY
from noria.observe.metrics.exemplars import Exemplars
from noria.observe.metrics.gpus import GpuCollector, open_nvml
from noria.observe.metrics.multiprocess import MultiprocessReader
from noria.observe.metrics.process_metrics import ProcessCollector

_exemplars = Exemplars()


def observe(
    histogram: Histogram, seconds: float, labels: Mapping[str, str], exemplar_labels: Mapping[str, str]
) -> None:
    """Count `seconds` and keep `who`, such as {"request_id": …}, the most telling first, as the example of its bucket."""
    name: str = histogram._name
    histogram.labels(**labels).observe(seconds)
    _exemplars.record(name, labels, DECLARATIONS[name].buckets, seconds, exemplar_labels, time.time())


def exposition(accept: str = "") -> tuple[bytes, str]:
    """All values, and their content type, in the format that the header `accept` asks for."""
    openmetrics = "application/openmetrics-text" in accept
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    multiprocess_text = "" if folder is None else _multiprocess_reader(folder).text(_exemplars if openmetrics else None)
    collector = _SingleProcessCollector() if folder is None else _ScrapeTimeCollector()
    if openmetrics:
        return multiprocess_text.encode() + generate_openmetrics(collector), CONTENT_TYPE_LATEST  # type: ignore[no-untyped-call]
    return multiprocess_text.encode() + generate_latest(collector), CONTENT_TYPE_PLAIN_0_0_4


@functools.cache
def _multiprocess_reader(folder: str) -> MultiprocessReader:
    return MultiprocessReader(folder)


@functools.cache
def _gpus() -> GpuCollector:
    return GpuCollector(open_nvml())


class _ScrapeTimeCollector:
    """What is read at the scrape, as prometheus_client's writers take it for a registry."""

    def collect(self) -> Iterator[Metric]:
        yield from ProcessCollector().collect()
        yield from _gpus().collect()


class _SingleProcessCollector(_ScrapeTimeCollector):
    """And what this process has counted, where it is alone."""

    def collect(self) -> Iterator[Metric]:
        yield from _exemplars.attach_to(REGISTRY.collect())
        yield from super().collect()
