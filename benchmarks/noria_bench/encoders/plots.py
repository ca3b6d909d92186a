"""The plots of `noria bench encoders`: throughput by connections, and latency under load."""

import math
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from noria_bench.encoders.options import CORPORA
from noria_bench.encoders.results import EncodersResult, Load, Measurement
from noria_bench.encoders.summary import best_rates, loads_of, measured, median, targets_of
from noria_bench.reports.plots.styles import save_figure, style_of

_TITLES = {"fixed": "one sentence", "mixed": "mixed texts"}


def plot_throughput(result: EncodersResult, file: pathlib.Path) -> pathlib.Path:
    """Requests per second by connections, a panel for each corpus; lines without markers are the raw loop."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(CORPORA), figsize=(9.0, 4.2), layout="constrained")
    for axes, corpus in zip(panels, CORPORA, strict=True):
        loads = [
            load for load in loads_of(result) if (load.corpus, load.loop) == (corpus, "closed") and load.client != "wrk"
        ]
        _plot_lines(axes, result, loads, lambda load: float(load.connections or 1), lambda each: each.requests_per_s)
        for target in targets_of(result):
            if target.startswith("raw") and (rates := best_rates(result, target, corpus)):
                style = style_of(target)
                axes.axhline(median(rates.values()), color=style["color"], linestyle=style["linestyle"], label=target)
        axes.set(xlabel="connections", ylabel="requests per second", title=_TITLES[corpus], ylim=(0, None))
        _log_axis(axes, [load.connections or 1 for load in loads])
    _legend(figure, panels)
    return save_figure(figure, file)


def plot_latency(result: EncodersResult, file: pathlib.Path) -> pathlib.Path:
    """p50 and p99 of mixed texts by connections, and p99 by the rate of an open loop."""
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 3, figsize=(11.0, 4.2), layout="constrained")
    mixed = [load for load in loads_of(result) if load.corpus == "mixed" and load.client == "own"]
    closed, opened = [load for load in mixed if load.loop == "closed"], [load for load in mixed if load.loop == "open"]
    for axes, title, value in (
        (panels[0], "median, closed loop", lambda each: each.p50_ms),
        (panels[1], "p99, closed loop", lambda each: each.p99_ms),
    ):
        _plot_lines(axes, result, closed, lambda load: float(load.connections or 1), value)
        axes.set(xlabel="connections", ylabel="milliseconds", title=title)
        _log_axis(axes, [load.connections or 1 for load in closed])
    _plot_lines(panels[2], result, opened, lambda load: load.rate or 0.0, lambda each: each.p99_ms)
    panels[2].set(xlabel="requests per second that arrive", ylabel="milliseconds", title="p99, open loop")
    for axes in panels:
        if axes.lines:
            axes.set_yscale("log")
    _legend(figure, panels)
    return save_figure(figure, file)


def _plot_lines(
    axes: Any,
    result: EncodersResult,
    loads: Sequence[Load],
    place: Callable[[Load], float],
    value: Callable[[Measurement], float | None],
) -> None:
    """A line for each target; a value that is not finite is left out."""
    for target in targets_of(result):
        points = [(place(load), median(value(each) for each in measured(result, target, load))) for load in loads]
        if finite := [point for point in points if math.isfinite(point[1])]:
            axes.plot(*zip(*finite, strict=True), label=target, **style_of(target))


def _log_axis(axes: Any, ticks: Sequence[int]) -> None:
    if ticks:
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.minorticks_off()


def _legend(figure: Any, panels: Any) -> None:
    """Add one legend for all panels."""
    found = {label: line for axes in panels for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend(found.values(), found.keys(), loc="outside upper center", ncols=5, frameon=False, fontsize=9)
