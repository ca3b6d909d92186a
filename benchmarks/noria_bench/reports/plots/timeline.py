"""The timeline plot: each request is a bar; below them, the number of images in generation."""

import pathlib
from typing import Any

from noria_bench.measurement.runs import BenchRun
from noria_bench.reports.plots.gantt import Bar, bars_of, images_in_generation, window_of
from noria_bench.reports.plots.styles import FAILED_COLOUR, WAITING_COLOUR, save_figure, style_of
from noria_bench.reports.run_groups import Group
from noria_bench.targets.catalog import TARGETS

# Inches per lane, between the bounds below.
_LANE_HEIGHT_IN = 0.055
_MIN_HEIGHT_IN, _MAX_HEIGHT_IN = 0.55, 1.6
_COUNT_HEIGHT_IN = 0.42


def plot_timeline(group: Group, file: pathlib.Path) -> pathlib.Path:
    """Two plots per target, one above the other, on the same time axis."""
    from matplotlib import lines, patches, pyplot

    windows = [window_of(run) for run in group.runs]
    bars_of_runs = [
        bars_of(
            run.records, *window, reports_queue_time=run.target not in TARGETS or TARGETS[run.target].reports_queue_time
        )
        for run, window in zip(group.runs, windows, strict=True)
    ]
    heights = []
    for bars in bars_of_runs:
        lanes = 1 + max((bar.lane for bar in bars), default=0)
        heights += [min(max(_MIN_HEIGHT_IN, _LANE_HEIGHT_IN * lanes), _MAX_HEIGHT_IN), _COUNT_HEIGHT_IN]
    figure, grid = pyplot.subplots(
        len(heights),
        1,
        figsize=(8.4, sum(heights) + 0.36 * len(bars_of_runs) + 1.0),
        gridspec_kw={"height_ratios": heights},
        squeeze=False,
        layout="constrained",
    )
    figure.get_layout_engine().set(h_pad=0.015, hspace=0.0)
    for index, (run, window, bars) in enumerate(zip(group.runs, windows, bars_of_runs, strict=True)):
        upper, lower = grid[2 * index][0], grid[2 * index + 1][0]
        _plot_bars(upper, run, bars, window)
        upper.set_title(group.label(run), fontsize=10, color=style_of(run.target)["color"], fontweight="bold", pad=2)
        _plot_image_count(lower, run, bars, window)
        if index < len(bars_of_runs) - 1:
            lower.set_xticklabels([])
    grid[-1][0].set_xlabel("seconds from the run’s start; below each: images in generation")
    handles: list[Any] = [
        patches.Patch(color=WAITING_COLOUR, label="queued"),
        patches.Patch(color="0.35", label="generating (in its target’s colour)"),
        patches.Patch(facecolor="0.35", alpha=0.45, hatch="////", edgecolor="white", label="queue time unknown"),
        lines.Line2D([], [], color=FAILED_COLOUR, linewidth=2, label="no images"),
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=4, frameon=False, fontsize=8.5, handlelength=1.4)
    return save_figure(figure, file)


def _plot_bars(axes: Any, run: BenchRun, bars: list[Bar], window: tuple[float, float]) -> None:
    colour = style_of(run.target)["color"]
    for bar in bars:
        row = (bar.lane + 0.1, 0.8)
        if bar.failed:
            axes.broken_barh([(bar.start_s, bar.end_s - bar.start_s)], row, facecolor=FAILED_COLOUR)
        elif bar.queue_time_known:
            axes.broken_barh([(bar.start_s, bar.generation_start_s - bar.start_s)], row, facecolor=WAITING_COLOUR)
            axes.broken_barh([(bar.generation_start_s, bar.end_s - bar.generation_start_s)], row, facecolor=colour)
        else:
            bar_style = {"facecolor": colour, "alpha": 0.45, "hatch": "////", "edgecolor": "white", "linewidth": 0}
            axes.broken_barh([(bar.start_s, bar.end_s - bar.start_s)], row, **bar_style)
    axes.set(xlim=window, ylim=(1 + max((bar.lane for bar in bars), default=0), 0))
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[["left", "bottom"]].set_visible(False)
    if not bars:
        axes.text(
            0.5, 0.5, "no requests in this window", transform=axes.transAxes, ha="center", va="center", color="0.4"
        )


def _plot_image_count(axes: Any, run: BenchRun, bars: list[Bar], window: tuple[float, float]) -> None:
    moments, counts = images_in_generation(bars, *window)
    colour = style_of(run.target)["color"]
    axes.fill_between(moments, counts, step="post", color=colour, alpha=0.3, linewidth=0)
    axes.step(moments, counts, where="post", color=colour, linewidth=1)
    max_count = max(max(counts, default=0), 1)
    axes.set(xlim=window, ylim=(0, 1.12 * max_count))
    axes.set_yticks([0, max_count])
    axes.tick_params(labelsize=8, length=2)
