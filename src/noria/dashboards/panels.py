"""What a dashboard is made of, whoever draws it. Pure data."""

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
"""Grafana's names of them."""

WIDTH = 24  # columns of Grafana's grid


@dataclass(frozen=True)
class Query:
    """PromQL, and what its series are called; `{{label}}` stands for a label's value."""

    expr: str
    legend: str = "__auto"
    exemplars: bool = False


@dataclass(frozen=True)
class Panel:
    """One picture. `text` says what it shows and what is good; `alarm` is the value from which on a stat is red."""

    title: str
    queries: tuple[Query, ...]
    description: str
    kind: PanelKind = "timeseries"
    unit: Unit = "short"
    width: int = 12
    height: int = 8
    stacked: bool = False
    alarm: float | None = None


@dataclass(frozen=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Dashboard:
    """All of it; `uid` is part of its address and never changes."""

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]
    tags: tuple[str, ...] = field(default=("noria",))

    @property
    def queries(self) -> tuple[Query, ...]:
        """Every query of every panel."""
        return tuple(query for row in self.rows for panel in row.panels for query in panel.queries)


def timeseries(title: str, description: str, *queries: Query | str, **options: object) -> Panel:
    """A panel of lines; a query may be just its PromQL."""
    panel_queries = tuple(query if isinstance(query, Query) else Query(query) for query in queries)
    return Panel(title, panel_queries, description, **options)  # type: ignore[arg-type]


def stat(title: str, description: str, expr: str, **options: object) -> Panel:
    """A panel of one number."""
    return Panel(title, (Query(expr),), description, kind="stat", width=3, height=4, **options)  # type: ignore[arg-type]


def states(title: str, description: str, query: Query) -> Panel:
    """A panel of bars over time, one for each series: green at 1, red at 0, none where it was not there."""
    return Panel(title, (query,), description, kind="state-timeline")


def quantiles(
    metric: str, selector: str, by: str = "", probabilities: tuple[float, ...] = (0.5, 0.95, 0.99)
) -> tuple[Query, ...]:
    """The quantiles of a histogram over five minutes, the highest with exemplars; `by` is a label to keep, if any."""
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
