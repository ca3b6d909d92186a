"""Exemplars: the latest request of each histogram bucket, so that a slow bucket leads to a log line and a trace.

prometheus_client keeps no exemplars across processes, so each front end keeps its own and exports them when scraped.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from opentelemetry.trace import INVALID_SPAN, format_trace_id
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

from noria.observe.request_scope import current_span

BucketKey = tuple[str, frozenset[tuple[str, str]]]  # a bucket's name and its labels
# OpenMetrics' limit for the names and values of an exemplar's labels together; Prometheus drops longer ones.
_MAX_LABEL_CHARS = 128


def exemplar_labels(request_id: str) -> dict[str, str]:
    """Return the labels of the current request's exemplars: its trace, if it is recorded, and its id.

    One that exceeds OpenMetrics' limit is left out.
    """
    span = current_span()
    labels: dict[str, str] = {}
    chars_left = _MAX_LABEL_CHARS
    if span is not INVALID_SPAN and (context := span.get_span_context()).trace_flags.sampled:
        labels["trace_id"] = format_trace_id(context.trace_id)  # the id of another trace would lead nowhere
        chars_left -= len("trace_id") + len(labels["trace_id"])
    if len("request_id") + len(request_id) <= chars_left:
        labels["request_id"] = request_id
    return labels


@dataclass
class Exemplars:
    """The latest exemplar of each bucket; bounded, since labels and buckets are."""

    _latest: dict[BucketKey, Exemplar] = field(default_factory=dict)

    def record(self, bucket: BucketKey, labels: dict[str, str], value: float, now: float) -> None:
        """Store the exemplar of an observation at `now`, Unix time; none without `labels`."""
        if labels:
            self._latest[bucket] = Exemplar(labels, value, now)

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
