"""The plots of a sweep: a heat map if two numbers were varied, and bars."""

import math
import pathlib
from collections.abc import Mapping
from typing import Any

from noria_bench.reports import reference_results
from noria_bench.reports.plots.styles import save_figure, style_of
from noria_bench.reports.run_groups import Group, variant_numbers
from noria_bench.reports.run_summary import RunSummary, summarise_run

_BATCHING_LABELS = ("batch timeout, ms", "batch size, images")


def is_grid(group: Group) -> bool:
    """Whether every run varied the same two numbers, each of which has several values."""
    points = [variant_numbers(run.variant) for run in group.runs]
    numeric_points = [point for point in points if point is not None]
    one_target = len({run.target for run in group.runs}) == 1
    return (
        one_target
        and len(numeric_points) == len(points)
        and all(len(set(axis)) > 1 for axis in zip(*numeric_points, strict=True))
    )


def plot_heat_map(group: Group, file: pathlib.Path) -> pathlib.Path:
    """Requests per second for each pair, some of which may be missing.

    The article's beside it, if it varied the same settings.
    """
    from matplotlib import pyplot

    measured = {variant_numbers(run.variant) or (0.0, 0.0): summarise_run(run).requests_per_s for run in group.runs}
    panels: dict[str, Mapping[tuple[float, float], float]] = {"this machine": measured}
    batching = "batch" in group.bench
    if batching:
        reference_rates = {
            (float(t), float(n)): row.num_requests / reference_results.SECONDS
            for (t, n), row in reference_results.BATCHING.items()
        }
        panels["the article, Tesla T4"] = reference_rates
    figure, grid = pyplot.subplots(
        1, len(panels), figsize=(4.0 * len(panels), 3.4), squeeze=False, layout="constrained"
    )
    for axes, (title, cells) in zip(grid[0], panels.items(), strict=True):
        _plot_heat_panel(axes, cells)
        axes.set_title(title)
        if batching:
            axes.set(xlabel=_BATCHING_LABELS[0], ylabel=_BATCHING_LABELS[1])
    figure.suptitle("requests per second; colours from each panel’s minimum to its maximum", fontsize=9)
    return save_figure(figure, file)


def plot_bars(group: Group, file: pathlib.Path) -> pathlib.Path:
    """A row for each setting: requests per second to the left, latency from p50 to p99 to the right."""
    from matplotlib import pyplot

    height = 1.1 + 0.36 * len(group.runs)
    figure, (rates, latencies) = pyplot.subplots(1, 2, figsize=(8.4, height), sharey=True, layout="constrained")
    for row_index, run in enumerate(group.runs):
        summary, colour = summarise_run(run), style_of(run.target)["color"]
        if math.isfinite(summary.requests_per_s):
            rates.barh(row_index, summary.requests_per_s, color=colour, height=0.62)
            rates.annotate(
                f"{summary.requests_per_s:.2f}",
                (summary.requests_per_s, row_index),
                (4, 0),
                textcoords="offset points",
                va="center",
                fontsize=9,
            )
        _plot_latency_span(latencies, row_index, summary, style_of(run.target))
    rates.set_yticks(range(len(group.runs)), [group.label(run) for run in group.runs])
    rates.invert_yaxis()
    rates.margins(x=0.18)
    rates.set(xlabel="requests per second")
    latencies.set(xlabel="latency, seconds: p50 to p99")
    latencies.set_xlim(left=0)
    latencies.tick_params(left=False)
    latencies.grid(axis="x", color="0.92")
    return save_figure(figure, file)


def _plot_heat_panel(axes: Any, cells: Mapping[tuple[float, float], float]) -> None:
    """Plot one panel: columns are the first number, rows the second, the smallest at the bottom."""
    columns, rows = (sorted({point[k] for point in cells}) for k in (0, 1))
    values = [[cells.get((column, row), math.nan) for column in columns] for row in rows]
    finite = [value for line in values for value in line if math.isfinite(value)]
    min_value, max_value = min(finite, default=0.0), max(finite, default=1.0)
    mesh_style = {"cmap": "cividis", "vmin": min_value, "vmax": max_value, "edgecolors": "white", "linewidth": 1.5}
    # Paths: an image would be embedded as a file.
    axes.pcolormesh(range(len(columns)), range(len(rows)), values, **mesh_style)
    for y, line in enumerate(values):
        for x, value in enumerate(line):
            known = math.isfinite(value)
            bright = not known or value > (min_value + max_value) / 2
            text, colour = (f"{value:.2f}", "black" if bright else "white") if known else ("not run", "0.45")
            axes.text(x, y, text, ha="center", va="center", color=colour, fontsize=10 if known else 8)
    axes.set_xticks(range(len(columns)), [f"{column:g}" for column in columns])
    axes.set_yticks(range(len(rows)), [f"{row:g}" for row in rows])
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _plot_latency_span(axes: Any, row_index: int, summary: RunSummary, style: Mapping[str, str]) -> None:
    p50_s, p99_s = summary.p50_ms / 1000, summary.p99_ms / 1000
    if not math.isfinite(p50_s):
        axes.text(
            0.02,
            row_index,
            "most requests failed",
            transform=axes.get_yaxis_transform(),
            va="center",
            fontsize=9,
            color="0.4",
        )
        return
    if math.isfinite(p99_s):
        axes.plot([p50_s, p99_s], [row_index, row_index], color=style["color"], linewidth=2)
        axes.plot(p99_s, row_index, color=style["color"], marker="|", markersize=9)
    else:
        axes.annotate(
            "p99 infinite",
            (p50_s, row_index),
            (12, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color="0.4",
        )
    axes.plot(p50_s, row_index, color=style["color"], marker=style["marker"], markersize=7)
