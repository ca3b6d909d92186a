"""Exemplars: the latest request of each histogram bucket, so that a slow bucket leads to a log line and a trace.

prometheus_client keeps no exemplars across processes, so each front end keeps its own and exports them when scraped.
"""

import bisect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

_BucketKey = tuple[str, frozenset[tuple[str, str]]]  # a bucket's name and its labels
# OpenMetrics' limit for the names and values of an exemplar's labels together; Prometheus drops longer ones.
_MAX_LABEL_CHARS = 128


@dataclass
class Exemplars:
    """The latest exemplar of each bucket; bounded, since labels and buckets are."""

    _latest: dict[_BucketKey, Exemplar] = field(default_factory=dict)

    def record(
        self,
        metric: str,
        labels: Mapping[str, str],
        buckets: tuple[float, ...],
        value: float,
        exemplar_labels: Mapping[str, str],
        now: float,
    ) -> None:
        """Store the exemplar of an observation at `now`, Unix time; `buckets` are the ascending upper bounds.

        Labels of `exemplar_labels` are taken in order; one that exceeds OpenMetrics' limit is left out.
        """
        kept_labels: dict[str, str] = {}
        chars_left = _MAX_LABEL_CHARS
        for name, text in exemplar_labels.items():
            if len(name) + len(text) <= chars_left:
                chars_left -= len(name) + len(text)
                kept_labels[name] = text
        if not kept_labels:
            return
        bucket_index = bisect.bisect_left(buckets, value)
        upper_bound: str = floatToGoString(buckets[bucket_index]) if bucket_index < len(buckets) else "+Inf"  # type: ignore[no-untyped-call]
        self._latest[f"{metric}_bucket", frozenset([*labels.items(), ("le", upper_bound)])] = Exemplar(
            kept_labels, value, now
        )

    def openmetrics_suffix(self, name: str, labels: frozenset[tuple[str, str]]) -> str:
        """Return the exemplar in OpenMetrics' format, to append to a bucket's line; empty without one."""
        exemplar = self._latest.get((name, labels))
        if exemplar is None:
            return ""
        label_pairs = ",".join(
            f'{label}="{escape_label_value(text)}"' for label, text in sorted(exemplar.labels.items())
        )
        return f" # {{{label_pairs}}} {floatToGoString(exemplar.value)} {exemplar.timestamp}"  # type: ignore[no-untyped-call]

    def attach_to(self, metrics: Iterable[Metric]) -> Iterator[Metric]:
        """Yield `metrics` with exemplars added to their buckets."""
        for metric in metrics:
            if metric.type == "histogram":
                metric.samples = [
                    sample._replace(exemplar=self._latest.get((sample.name, frozenset(sample.labels.items()))))
                    for sample in metric.samples
                ]
            yield metric


def escape_label_value(text: str) -> str:
    """Escape a label value as both text formats require."""
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
