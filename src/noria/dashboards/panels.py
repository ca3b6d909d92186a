"""The parts of a dashboard, independent of Grafana's format. Pure data."""

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


def timeseries(title: str, description: str, *queries: Query | str, **options: object) -> Panel:
    """Return a time series panel; a query may be given as PromQL only."""
    panel_queries = tuple(query if isinstance(query, Query) else Query(query) for query in queries)
    return Panel(title, panel_queries, description, **options)  # type: ignore[arg-type]


def stat(title: str, description: str, expr: str, **options: object) -> Panel:
    """Return a panel with one number."""
    return Panel(title, (Query(expr),), description, kind="stat", width=3, height=4, **options)  # type: ignore[arg-type]


def states(title: str, description: str, query: Query) -> Panel:
    """Return a state timeline with one bar per series: green at 1, red at 0, empty without a value."""
    return Panel(title, (query,), description, kind="state-timeline")


def quantiles(
    metric: str, selector: str, by: str = "", probabilities: tuple[float, ...] = (0.5, 0.95, 0.99)
) -> tuple[Query, ...]:
    """Return queries of a histogram's quantiles over five minutes, the highest with exemplars.

    By the label `by`, if given.
    """
    by_labels = f"le, {by}" if by else "le"
    legend = " {{" + by + "}}" if by else ""
    return tuple(
        Query(
            f"histogram_quantile({probability}, sum by ({by_labels}) (rate({metric}_bucket{{{selector}}}[5m])))",
            f"p{100 * probability:g}{legend}",
            exemplars=probability == max(probabilities),
        )
        for probability in probabilities
    )
