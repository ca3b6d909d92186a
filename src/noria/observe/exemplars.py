"""Which request an observation was: for each bucket of a histogram the latest one, so that a slow bucket leads to a line of the log and a trace.

prometheus_client keeps no exemplars across processes, so each front end keeps its own, and those of the one that is asked are given.
"""

import bisect
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

_Key = tuple[str, frozenset[tuple[str, str]]]  # a bucket's name and its labels
_LONGEST = (
    128  # characters of the names and values of an exemplar's labels, in OpenMetrics; Prometheus drops what is longer
)


@dataclass
class Exemplars:
    """The latest of each bucket; as many as there are buckets, so bounded as labels are."""

    _latest: dict[_Key, Exemplar] = field(default_factory=dict)

    def note(
        self,
        metric: str,
        labels: Mapping[str, str],
        buckets: tuple[float, ...],
        value: float,
        who: Mapping[str, str],
        now: float,
    ) -> None:
        """`value` was observed of `who` at `now`, Unix time. `buckets` are the metric's upper bounds, rising.

        A label of `who` for which there is no room behind those before it is left out.
        """
        labelled: dict[str, str] = {}
        room = _LONGEST
        for name, text in who.items():
            if len(name) + len(text) <= room:
                room -= len(name) + len(text)
                labelled[name] = text
        if not labelled:
            return
        place = bisect.bisect_left(buckets, value)
        bound: str = floatToGoString(buckets[place]) if place < len(buckets) else "+Inf"  # type: ignore[no-untyped-call]
        self._latest[f"{metric}_bucket", frozenset([*labels.items(), ("le", bound)])] = Exemplar(labelled, value, now)

    def words(self, name: str, labels: frozenset[tuple[str, str]]) -> str:
        """What follows a bucket's value in OpenMetrics; nothing for one without an exemplar."""
        found = self._latest.get((name, labels))
        if found is None:
            return ""
        who = ",".join(f'{label}="{escaped(text)}"' for label, text in sorted(found.labels.items()))
        return f" # {{{who}}} {floatToGoString(found.value)} {found.timestamp}"  # type: ignore[no-untyped-call]

    def pinned(self, metrics: Iterable[Metric]) -> Iterator[Metric]:
        """`metrics` with the exemplars of their buckets."""
        for metric in metrics:
            if metric.type == "histogram":
                metric.samples = [
                    sample._replace(exemplar=self._latest.get((sample.name, frozenset(sample.labels.items()))))
                    for sample in metric.samples
                ]
            yield metric


def escaped(text: str) -> str:
    """A label's value as both formats quote it."""
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
