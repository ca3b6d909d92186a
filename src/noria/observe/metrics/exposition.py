"""The content of `/metrics`: the values of all processes, summed, and values read at the scrape.

Only OpenMetrics has exemplars; a scraper that does not ask for it gets Prometheus' text format.
"""

import functools
import os
import time
from collections.abc import Iterator, Mapping

from prometheus_client import Counter, Histogram
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.parser import text_string_to_metric_families

from noria.observe.metrics.declarations import DECLARATIONS, REGISTRY
from noria.observe.metrics.exemplars import Exemplars
from noria.observe.metrics.gpus import GpuCollector, open_nvml
from noria.observe.metrics.multiprocess import MultiprocessReader
from noria.observe.metrics.process_metrics import ProcessCollector

_exemplars = Exemplars()


def observe(
    histogram: Histogram, seconds: float, labels: Mapping[str, str], exemplar_labels: Mapping[str, str]
) -> None:
    """Observe `seconds` and keep `exemplar_labels`, most important first, as the exemplar of the bucket."""
    name: str = histogram._name
    histogram.labels(**labels).observe(seconds)
    _exemplars.record(name, labels, DECLARATIONS[name].buckets, seconds, exemplar_labels, time.time())


def exposition(
    accept: str = "", *, with_exemplars: bool = True, folder: str | None = None, process: str = "frontend"
) -> tuple[bytes, str]:
    """Return all values and their content type, in the format that the header `accept` asks for.

    `folder` has the files of the processes; None: PROMETHEUS_MULTIPROC_DIR, if there is one. `process` names this
    process if it has no title of its own.
    """
    openmetrics = "application/openmetrics-text" in accept
    exemplars = _exemplars if with_exemplars else Exemplars()
    folder = folder or os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    multiprocess_text = "" if folder is None else _multiprocess_reader(folder).text(exemplars if openmetrics else None)
    collector = _SingleProcessCollector(exemplars, process) if folder is None else _ScrapeTimeCollector(process)
    if openmetrics:
        return multiprocess_text.encode() + generate_openmetrics(collector), CONTENT_TYPE_LATEST  # type: ignore[no-untyped-call]
    return multiprocess_text.encode() + generate_latest(collector), CONTENT_TYPE_PLAIN_0_0_4


def counter_values(counter: Counter) -> list[tuple[dict[str, str], float]]:
    """Return the labels and the value of each series of a counter, summed over all processes. Reads files."""
    name = f"{counter._name}_total"
    lines = [line for line in exposition()[0].decode().splitlines() if line.startswith((f"{name}{{", f"{name} "))]
    families = text_string_to_metric_families("\n".join([*lines, ""]))
    return [(sample.labels, sample.value) for family in families for sample in family.samples]


@functools.cache
def _multiprocess_reader(folder: str) -> MultiprocessReader:
    return MultiprocessReader(folder)


@functools.cache
def _gpus() -> GpuCollector:
    return GpuCollector(open_nvml())


class _ScrapeTimeCollector:
    """The values read at the scrape; prometheus_client's writers accept it as a registry."""

    def __init__(self, process: str) -> None:
        self._process = process

    def collect(self) -> Iterator[Metric]:
        yield from ProcessCollector(self._process).collect()
        yield from _gpus().collect()


class _SingleProcessCollector(_ScrapeTimeCollector):
    """Also the values of this process, if it is the only one."""

    def __init__(self, exemplars: Exemplars, process: str) -> None:
        super().__init__(process)
        self._exemplars = exemplars

    def collect(self) -> Iterator[Metric]:
        yield from self._exemplars.attach_to(REGISTRY.collect())
        yield from super().collect()
