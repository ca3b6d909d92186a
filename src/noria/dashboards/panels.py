"""The parts of a dashboard, independent of Grafana's format. Pure data."""

import re
from dataclasses import dataclass, field
from typing import Literal

PanelKind = Literal["timeseries", "stat", "heatmap", "state-timeline"]
Unit = Literal[
    "short",
    "s",
    "percentunit",
    "percent",
    "bytes",
    "reqps",
    "ops",
    "decmbytes",
    "celsius",
    "watt",
    "rotmhz",
    "dateTimeFromNow",
]
"""Grafana's names of units."""

WIDTH = 24  # columns of Grafana's grid
_METRIC = re.compile(r"\b(noria_\w+)(?:\{([^}]*)\})?")


@dataclass(frozen=True)
class Query:
    """A PromQL query and the legend of its series; `{{label}}` in it is replaced by the label's value."""

    expr: str
    legend: str = "__auto"
    exemplars: bool = False


@dataclass(frozen=True)
class Panel:
    """A panel. A stat is red from `threshold` on."""

    title: str
    queries: tuple[Query, ...]
    description: str
    kind: PanelKind = "timeseries"
    unit: Unit = "short"
    width: int = 12
    height: int = 8
    stacked: bool = False
    threshold: float | None = None


@dataclass(frozen=True)
class Row:
    """Panels under a heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Dashboard:
    """A dashboard; `uid` is part of its URL and must not change. Readers choose values of `labels` of statistics."""

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]
    tags: tuple[str, ...] = field(default=("noria",))
    labels: tuple[str, ...] = ()

    @property
    def queries(self) -> tuple[Query, ...]:
        """All queries of all panels."""
        return tuple(query for row in self.rows for panel in row.panels for query in panel.queries)


def row(title: str, *panels: Panel) -> Row:
    """Return panels under a heading."""
    return Row(title, panels)


def query(expr: str, legend: str = "__auto", *, exemplars: bool = False) -> Query:
    """Return a query of the servers that the reader has chosen, whose selector Noria's metrics in `expr` get."""
    selected = _METRIC.sub(
        lambda found: f'{found[1]}{{instance=~"$instance"{(found[2] and "," + found[2]) or ""}}}', expr
    )
    return Query(selected, legend, exemplars)


def mean(total: str, count: str, *labels: str, legend: str = "", window: str = "5m") -> Query:
    """Return the query of one counter divided by another, by these labels; no value where the other does not grow."""
    total, count = (f"sum by ({', '.join(labels)}) (rate({metric}[{window}]))" for metric in (total, count))
    return query(f"{total} / ({count} > 0)", legend or " ".join(f"{{{{{label}}}}}" for label in labels))


def timeseries(title: str, description: str, *queries: Query, **options: object) -> Panel:
    """Return a time series panel."""
    return Panel(title, queries, description, **options)  # type: ignore[arg-type]


def stat(title: str, description: str, expr: str, **options: object) -> Panel:
    """Return a panel with one number, of the servers that the reader has chosen."""
    return Panel(title, (query(expr),), description, kind="stat", width=3, height=4, **options)  # type: ignore[arg-type]


def states(title: str, description: str, of_series: Query) -> Panel:
    """Return a state timeline with one bar per series: green at 1, red at 0, empty without a value."""
    return Panel(title, (of_series,), description, kind="state-timeline")


def quantiles(metric: str, by: str = "", probabilities: tuple[float, ...] = (0.5, 0.95, 0.99)) -> tuple[Query, ...]:
    """Return queries of a histogram's quantiles over five minutes, the highest with exemplars.

    By the label `by`, if given.
    """
    by_labels = f"le, {by}" if by else "le"
    legend = " {{" + by + "}}" if by else ""
    return tuple(
        query(
            f"histogram_quantile({probability}, sum by ({by_labels}) (rate({metric}_bucket[5m])))",
            f"p{100 * probability:g}{legend}",
            exemplars=probability == max(probabilities),
        )
        for probability in probabilities
    )
