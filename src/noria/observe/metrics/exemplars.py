"""Which request an observation was: for each bucket of a histogram the latest one, so that a slow bucket leads to a line of the log and a trace.

prometheus_client keeps no exemplars across processes, so each front end keeps its own, and those of the one that is asked are given.
"""

import bisect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

_BucketKey = tuple[str, frozenset[tuple[str, str]]]  # a bucket's name and its labels
_MAX_LABEL_CHARS = (
    128  # characters of the names and values of an exemplar's labels, in OpenMetrics; Prometheus drops what is longer
)


@dataclass
class Exemplars:
    """The latest of each bucket; as many as there are buckets, so bounded as labels are."""

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
        """`value` was observed of `who` at `now`, Unix time. `buckets` are the metric's upper bounds, rising.

        A label of `who` for which there is no room behind those before it is left out.
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
        """What follows a bucket's value in OpenMetrics; nothing for one without an exemplar."""
        exemplar = self._latest.get((name, labels))
        if exemplar is None:
            return ""
        label_pairs = ",".join(
            f'{label}="{escape_label_value(text)}"' for label, text in sorted(exemplar.labels.items())
        )
        return f" # {{{label_pairs}}} {floatToGoString(exemplar.value)} {exemplar.timestamp}"  # type: ignore[no-untyped-call]

    def attach_to(self, metrics: Iterable[Metric]) -> Iterator[Metric]:
        """`metrics` with the exemplars of their buckets."""
        for metric in metrics:
            if metric.type == "histogram":
                metric.samples = [
                    sample._replace(exemplar=self._latest.get((sample.name, frozenset(sample.labels.items()))))
                    for sample in metric.samples
                ]
            yield metric


def escape_label_value(text: str) -> str:
    """A label's value as both formats quote it."""
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
