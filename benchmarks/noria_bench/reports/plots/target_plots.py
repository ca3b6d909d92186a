"""The plots of a group of runs, as SVG: which there are, and those that compare targets."""

import math
import pathlib
from dataclasses import dataclass, replace
from typing import Any

from noria_bench.reports.plots.load_curves import plot_load_curves
from noria_bench.reports.plots.styles import report_style, save_figure, style_of
from noria_bench.reports.plots.sweep_plots import is_grid, plot_bars, plot_heat_map
from noria_bench.reports.plots.timeline import plot_timeline
from noria_bench.reports.run_groups import DEADLINES, Group
from noria_bench.reports.run_summary import summarise_run


@dataclass(frozen=True)
class Plot:
    """A file with its title and alternative text."""

    file: pathlib.Path
    title: str
    alt: str


def plot_group(group: Group, folder: pathlib.Path) -> list[Plot]:
    """Write the group's plots into `folder`, which is created if needed."""
    with report_style():
        if group.bench == DEADLINES:
            return _plots_of_deadlines(group, folder)
        if group.is_sweep:
            return _plots_of_sweep(group, folder)
        return _plots_of_targets(replace(group, runs=group.main_runs), folder)


def _plots_of_targets(group: Group, folder: pathlib.Path) -> list[Plot]:
    names = ", ".join(group.label(run) for run in group.runs)
    return [
        Plot(
            plot_throughput(group, folder / f"{group.slug}-throughput.svg"),
            "Latency against throughput: lower right is better",
            f"{names}: requests per second against median latency, with a line up to the p99; "
            "the numbers are in the table of requests.",
        ),
        Plot(
            plot_latency_distribution(group, folder / f"{group.slug}-latency.svg"),
            "Distribution of latency: upper left is better",
            f"{names}: the share of all requests that had their images within a number of seconds; "
            "the quantiles are in the table of requests.",
        ),
        Plot(
            plot_timeline(group, folder / f"{group.slug}-timeline.svg"),
            "Timeline: grey is queued, colour is generating",
            f"{names}, each in the middle of its run: every request as a bar from its start to its end, grey while it "
            "was queued and coloured during generation; below, the number of images in generation.",
        ),
    ]


def _plots_of_deadlines(group: Group, folder: pathlib.Path) -> list[Plot]:
    file = plot_load_curves(group, folder / f"{group.slug}-load.svg")
    alt = (
        "For each policy, the share of requests within their deadlines, and their rate, against load; "
        "the tables have the numbers."
    )
    return [Plot(file, "Attainment and goodput against load", alt)]


def _plots_of_sweep(group: Group, folder: pathlib.Path) -> list[Plot]:
    bars = Plot(
        plot_bars(group, folder / f"{group.slug}-bars.svg"),
        "Requests per second and latency, by settings",
        "For each row of the table of requests: requests per second, and latency from its median to its p99.",
    )
    if not is_grid(group):
        return [bars]
    file = plot_heat_map(group, folder / f"{group.slug}-heat-map.svg")
    alt = (
        "Requests per second for each pair of settings, here and in the article; "
        "the numbers are in the tables of requests."
    )
    return [Plot(file, "Requests per second, by both settings", alt), bars]


def plot_throughput(group: Group, file: pathlib.Path) -> pathlib.Path:
    """A point for each target at its requests per second and median latency, and its p99 (infinite: an arrow)."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.6, 4.2), layout="constrained")
    summaries = [(run, summarise_run(run)) for run in group.runs]
    finite = [
        value / 1000 for _, summary in summaries for value in (summary.p50_ms, summary.p99_ms) if math.isfinite(value)
    ]
    top = 1.6 * max(finite, default=1.0)
    for run, summary in summaries:
        style = style_of(run.target)
        marker_style = {"color": style["color"], "marker": style["marker"], "linestyle": "none", "markersize": 8}
        label = group.label(run)
        if not math.isfinite(summary.p50_ms):
            axes.plot([], [], **marker_style, markerfacecolor="none", label=f"{label} (most fail)")
            continue
        end = summary.p99_ms / 1000 if math.isfinite(summary.p99_ms) else top
        axes.plot(
            [summary.requests_per_s] * 2, [summary.p50_ms / 1000, end], color=style["color"], linewidth=1.4, alpha=0.7
        )
        axes.plot(
            summary.requests_per_s,
            end,
            color=style["color"],
            marker="_" if math.isfinite(summary.p99_ms) else "^",
            markersize=9,
        )
        axes.plot(summary.requests_per_s, summary.p50_ms / 1000, **marker_style, markeredgecolor="white", label=label)
    axes.set_yscale("log")
    axes.set(xlabel="requests per second", ylabel="latency, seconds: p50 to p99")
    axes.set_xlim(0, 1.08 * max((summary.requests_per_s for _, summary in summaries), default=1.0) or 1.0)
    axes.set_ylim(0.7 * min(finite, default=0.1), 1.08 * top)
    set_plain_second_ticks(axes.yaxis)
    axes.grid(color="0.92")
    figure.legend(loc="outside right upper", frameon=False, fontsize=9)
    return save_figure(figure, file)


def plot_latency_distribution(group: Group, file: pathlib.Path) -> pathlib.Path:
    """The cumulative distribution of latency over all requests: a curve that ends below 1 has failures."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.6, 4.2), layout="constrained")
    # Noria, which is first, is drawn on top.
    for run in reversed(group.runs):
        style = style_of(run.target)
        seconds = sorted(record.latency_s for record in run.records if math.isfinite(record.latency_s))
        shares = [(k + 1) / len(run.records) for k in range(len(seconds))]
        width = 2.4 if run.target == "noria" else 1.5
        line_style = {"color": style["color"], "linestyle": style["linestyle"], "linewidth": width}
        axes.step(seconds, shares, where="post", label=group.label(run), **line_style)
    axes.set_xscale("log")
    set_plain_second_ticks(axes.xaxis)
    axes.set(xlabel="seconds from the intended start", ylabel="share of all requests", ylim=(0, 1.02))
    axes.grid(color="0.92")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", frameon=False, fontsize=9)
    return save_figure(figure, file)


def set_plain_second_ticks(axis: Any) -> None:
    """Plain ticks on a logarithmic axis: 0.5, 1, 2, 5, 10; more of them if it spans less than a decade."""
    from matplotlib import ticker

    low, high = axis.get_view_interval()
    axis.set_major_locator(
        ticker.LogLocator(subs=(1.0, 2.0, 5.0) if high > 10 * low else (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0))
    )
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(ticker.NullLocator())
