"""The variables as metrics: one family each, `noria_stat_NAME`, whose labels are endpoint and version.

Counts are added many at a time, twice a second, so that a request need not wait for the files of metrics.
"""

from dataclasses import dataclass

from prometheus_client import Counter, Histogram

from noria.errors import ConfigError, short_repr
from noria.observe.metrics import declarations
from noria.statistics import distributions
from noria.statistics.distributions import Counts
from noria.statistics.variables import Variable

_LABELS = ("endpoint", "version")


@dataclass(frozen=True)
class _Family:
    variable: Variable
    metric: Counter | Histogram


_families: dict[str, _Family] = {}  # families of this process, by the variable's name


def declare_family(variable: Variable) -> None:
    """Export a variable from now on.

    Raises ConfigError: it was declared otherwise before; its counts are exported until the server ends.
    """
    known = _families.get(variable.name)
    if known is None:
        _families[variable.name] = _Family(variable, _make_metric(variable))
    elif not known.variable.is_alike(variable):
        was = known.variable
        raise ConfigError(
            f"the variable {variable.name} is {_describe(variable)}; since the start it is {_describe(was)}, which a "
            "server cannot change while it runs. Give it another name, or restart the server."
        )


def _describe(variable: Variable) -> str:
    return f"a {variable.kind}" + (f" with the edges {short_repr(variable.edges)}" if variable.edges else "")


def _make_metric(variable: Variable) -> Counter | Histogram:
    name, text = f"noria_stat_{variable.name}", variable.description or f"The variable {variable.name}."
    match variable.kind:
        case "category":
            return Counter(name, text, (*_LABELS, "category"), registry=declarations.REGISTRY)
        case "counter":
            return Counter(name, text, _LABELS, registry=declarations.REGISTRY)
        case _:
            edges = variable.edges or (0.0,)
            return Histogram(name, text, _LABELS, buckets=edges, registry=declarations.REGISTRY)


def export_counts(variable: str, endpoint: str, version: str, counts: Counts) -> None:
    """Add counts of a declared variable to its family."""
    metric = _families[variable].metric
    if isinstance(counts, distributions.CategoryCounts):
        assert isinstance(metric, Counter), "categories are counted by a counter"
        for category, count in counts.cells().items():
            metric.labels(endpoint, version, category).inc(count)
        return
    if counts.num_invalid:
        declarations.STATISTICS_INVALID.labels(endpoint, version, variable).inc(counts.num_invalid)
    if isinstance(metric, Counter):
        metric.labels(endpoint, version).inc(counts.sum)
        return
    series = metric.labels(endpoint, version)
    for bucket, count in zip(series._buckets, counts.counts, strict=True):
        if count:
            bucket.inc(count)
    series._sum.inc(counts.sum)
