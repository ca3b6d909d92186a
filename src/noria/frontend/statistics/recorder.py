"""Counts the variables of requests in a front end, in memory; twice a second the counts go to the metrics and reports.

A variable is one family of metrics, `noria_stat_NAME`, whose labels are endpoint and version. Counts are added many
at a time, so that a request need not wait for the files of metrics.

Everything here runs in the event loop. A value costs about a microsecond, and memory is bounded: there are as many
counts as variables of versions at endpoints, and each has a limited number of cells.
"""

import asyncio
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from prometheus_client import Counter, Histogram

from noria.config import StatisticsConfig
from noria.errors import ConfigError, short_repr
from noria.frontend.engines.versions.version_choice import RequestVersions
from noria.observe.metrics import declarations
from noria.statistics import distributions
from noria.statistics.distributions import MAX_CATEGORIES, CategoryCounts, Counts, merge_counts, most_frequent
from noria.statistics.values import Values
from noria.statistics.variables import Declarations, Variable
from noria.statistics.windows import MAX_CELLS, CountsReport, SeriesKey

_EXPORT_INTERVAL_S = 0.5
_REPORT_CELLS = 25  # that a report takes beside its own, in memory: of `MAX_CELLS`, at most 20,000 reports wait
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


class StatisticsRecorder:
    """The counts of a front end. Raises ConfigError: the configuration's variables are not allowed."""

    def __init__(
        self,
        config: StatisticsConfig = StatisticsConfig(),  # noqa: B008 - immutable
        clock: Callable[[], float] = time.time,
        draw: Callable[[], float] = random.random,
    ) -> None:
        """`draw` returns numbers from 0 to below 1, by which requests are sampled."""
        self._window_s, self._clock, self._draw = config.window_s, clock, draw
        self._declarations = Declarations(config)
        for variable in self._declarations.variables.values():
            declare_family(variable)
        self._code: dict[str, Mapping[str, Variable]] = {}  # variables of classes, by endpoint
        self._at: dict[str, tuple[dict[str, Variable], dict[str, float]]] = {}  # variables and sampling, by endpoint
        self._counts: dict[tuple[str, str], dict[str, Counts]] = {}  # since the last flush; by endpoint and version
        self._categories: dict[SeriesKey, set[str]] = {}  # those that have time series
        self._reports: dict[tuple[SeriesKey, int], CountsReport] = {}  # that wait for the registrar
        self._num_cells = 0  # cells of these reports
        self._has_reader = False  # whether somebody takes the reports

    def declare_code(self, endpoint: str, variables: Mapping[str, Variable]) -> None:
        """Count what the class of an endpoint declares, and what it declared before.

        Raises ConfigError: a variable is counted otherwise already.
        """
        for variable in variables.values():
            known = self._declarations.variables.get(variable.name)
            if known is not None and not known.is_alike(variable):
                raise ConfigError(
                    f"endpoint {endpoint!r}: its class declares {variable.name} otherwise than statistics.variables of "
                    "the configuration. Leave one of them out."
                )
        for variable in variables.values():
            try:
                declare_family(variable)
            except ConfigError as error:
                raise ConfigError(f"endpoint {endpoint!r}: {error.message}") from error
        self._code[endpoint] = {**self._code.get(endpoint, {}), **variables}
        self._at.pop(endpoint, None)

    def variables_at(self, endpoint: str) -> Mapping[str, Variable]:
        """Return the variables of an endpoint, by name."""
        found = self._at.get(endpoint)
        if found is None:
            found = self._at[endpoint] = self._declared_at(endpoint)
        return found[0]

    def wanted(self, endpoint: str) -> Mapping[str, Variable]:
        """Return the variables of which a new request is counted; of most requests all of the endpoint, or none."""
        variables, sampled = self._at.get(endpoint) or (self.variables_at(endpoint), self._at[endpoint][1])
        if not sampled:
            return variables
        drawn = self._draw()
        return {name: variable for name, variable in variables.items() if drawn < sampled.get(name, 1.0)}

    def _declared_at(self, endpoint: str) -> tuple[dict[str, Variable], dict[str, float]]:
        sampling = self._declarations.sampling_at(endpoint)
        variables = {name: self._declarations.variables[name] for name in sampling} | dict(self._code.get(endpoint, {}))
        return variables, {name: share for name, share in sampling.items() if share < 1}

    def record(
        self,
        endpoint: str,
        version: str,
        wanted: Mapping[str, Variable],
        values: Values,
        versions: RequestVersions | None = None,
    ) -> None:
        """Count the values of one request, also for a canary that it takes part in; a job has no `versions`."""
        counts = self._counts.get((endpoint, version))
        if counts is None:
            counts = self._counts[endpoint, version] = {}
        for name, value in values:
            mine = counts.get(name)
            if mine is None:
                mine = counts[name] = wanted[name].new_counts()
            if isinstance(mine, CategoryCounts):
                mine.record(str(value))
            else:
                mine.record(float(value))
        if versions is not None:
            versions.add_values(endpoint, wanted, values)

    def _exported(self, series: SeriesKey, counts: Counts) -> Counts:
        """Return counts for the metrics: of the first 64 categories, as each is a time series, and "other"."""
        if not isinstance(counts, CategoryCounts):
            return counts
        known = self._categories.setdefault(series, set())
        known.update(
            most_frequent({name: each for name, each in counts.counts.items() if name not in known})[
                : MAX_CATEGORIES - len(known)
            ]
        )
        return counts.only(known)

    def flush(self) -> None:
        """Add what was counted to the metrics, and to the reports if somebody takes them."""
        counted, self._counts = self._counts, {}
        window = int(self._clock() / self._window_s)
        for (endpoint, version), variables in counted.items():
            for name, counts in variables.items():
                series = SeriesKey(endpoint, version, name)
                export_counts(name, endpoint, version, self._exported(series, counts))
                if self._has_reader:
                    self._add_report(series, window, counts)

    def _add_report(self, series: SeriesKey, window: int, counts: Counts) -> None:
        kind, known = self._at[series.endpoint][0][series.variable].kind, self._reports.get((series, window))
        total = counts if known is None else merge_counts(known.counts, counts)
        self._reports[series, window] = CountsReport(series, kind, window, total)
        self._num_cells += _size(total) - (0 if known is None else _size(known.counts))
        while self._num_cells > MAX_CELLS:  # the oldest are dropped
            self._num_cells -= _size(self._reports.pop(next(iter(self._reports))).counts)

    def take_reports(self) -> tuple[CountsReport, ...]:
        """Flush, and return what was counted since the last call."""
        self._has_reader = True
        self.flush()
        taken, self._reports, self._num_cells = self._reports, {}, 0
        return tuple(taken.values())

    async def run(self) -> None:
        """Flush twice a second until cancelled, and then once more."""
        try:
            while True:
                await asyncio.sleep(_EXPORT_INTERVAL_S)
                self.flush()
        finally:
            self.flush()


def _size(counts: Counts) -> int:
    """About what a report of the counts takes in memory, in cells."""
    return _REPORT_CELLS + len(counts.counts)
