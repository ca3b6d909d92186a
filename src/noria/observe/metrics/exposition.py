"""The content of `/metrics`: the values of all processes, summed, and values read at the scrape.

Only OpenMetrics has exemplars; a scraper that does not ask for it gets Prometheus' text format.
"""

import bisect
import functools
import os
import time
from dataclasses import dataclass
from typing import Any

from prometheus_client import Counter, Histogram
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.exposition import CONTENT_TYPE_LATEST
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.samples import Sample
from prometheus_client.utils import floatToGoString

from noria.observe.metrics.declarations import REGISTRY
from noria.observe.metrics.exemplars import BucketKey, Exemplars
from noria.observe.metrics.gpus import gpu_metrics, open_nvml
from noria.observe.metrics.multiprocess import MultiprocessReader
from noria.observe.metrics.process_metrics import process_metrics

_exemplars = Exemplars()


def keep_exemplar(exemplar: dict[str, str], *observed: tuple[Histogram, float, tuple[str, ...]]) -> None:
    """Have `exemplar`, of `exemplar_labels`, be that of the buckets of what was observed in series by labels."""
    now = time.time()
    for histogram, seconds, labels in observed:
        bucket_index = bisect.bisect_left(histogram._upper_bounds, seconds)
        _exemplars.record(_bucket_keys(histogram, *labels)[bucket_index], exemplar, seconds, now)


@functools.cache
def series(metric: Counter | Histogram, *labels: str) -> Any:
    """Return `metric.labels(*labels)` in a tenth of its time. Labels are bounded, and so is the cache."""
    return metric.labels(*labels)


@functools.cache
def _bucket_keys(histogram: Histogram, *labels: str) -> list[BucketKey]:
    pairs = list(zip(histogram._labelnames, labels, strict=True))
    return [
        (f"{histogram._name}_bucket", frozenset([*pairs, ("le", floatToGoString(bound))]))  # type: ignore[no-untyped-call]
        for bound in histogram._upper_bounds
    ]


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
    own_metrics = exemplars.attach_to(REGISTRY.collect()) if folder is None else ()
    collector = _Collected([*own_metrics, *process_metrics(process), *gpu_metrics(open_nvml())])
    if openmetrics:
        return multiprocess_text.encode() + generate_openmetrics(collector), CONTENT_TYPE_LATEST  # type: ignore[no-untyped-call]
    return multiprocess_text.encode() + generate_latest(collector), CONTENT_TYPE_PLAIN_0_0_4


def samples() -> list[Sample]:
    """Return the values of all processes, summed, without those read at the scrape. Reads files."""
    folder = os.environ.get("PROMETHEUS_MULTIPROC_DIR")
    if folder is None:
        return [sample for metric in REGISTRY.collect() for sample in metric.samples]
    return _multiprocess_reader(folder).samples()


@functools.cache
def _multiprocess_reader(folder: str) -> MultiprocessReader:
    return MultiprocessReader(folder)


@dataclass
class _Collected:
    """Metrics; prometheus_client's writers accept it as a registry."""

    metrics: list[Metric]

    def collect(self) -> list[Metric]:
        return self.metrics
